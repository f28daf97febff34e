#!/usr/bin/env python3
"""Makes the seeds of the fuzz targets of model files: small valid files of every kind.

    pip install numpy gguf==0.19.0 && tests/fuzz/make_corpus.py
"""
import json
import pathlib
import struct
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))
import make_gguf  # noqa: E402
from gguf import GGUFWriter  # noqa: E402

CORPUS = HERE / "corpus"


def safetensors(header, data, pad=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def make_safetensors():
    out = CORPUS / "safetensors"
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for dtype, size in sizes.items():
        raw = bytes(range(6 * size))
        header["t." + dtype] = {"dtype": dtype, "shape": [2, 3],
                                "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    (out / "types").write_bytes(safetensors(header, data))
    (out / "empty").write_bytes(safetensors({}, b""))
    (out / "scalar").write_bytes(safetensors(
        {"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
         "z": {"dtype": "F32", "shape": [0, 5], "data_offsets": [4, 4]}}, b"\0\0\x80\x3f", pad=False))
    (out / "twice").write_bytes(safetensors(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\1"))


def make_ggufs():
    out = CORPUS / "gguf"
    make_gguf.OUT = out
    for arch, bias in (("llama", True), ("qwen2", True), ("qwen3", False)):
        rope = {"llama": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                "qwen3": {"rope_type": "yarn", "factor": 4.0,
                          "original_max_position_embeddings": 32768}}.get(arch)
        config = make_gguf.base(vocab_size=5, hidden_size=4, intermediate_size=4, head_dim=4,
                                num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                rope_scaling=rope, tie_word_embeddings=arch != "qwen2")
        make_gguf.make_model(arch, config, qkv_bias=bias, o_bias=arch == "llama",
                             qk_norm=arch == "qwen3")
        for name in ("config.json", "model.safetensors"):
            source = out / arch / name
            if name == "config.json":
                (CORPUS / "model_config" / f"{arch}_tiny").write_bytes(source.read_bytes())
            source.unlink()
        (out / arch).rmdir()
    writer = GGUFWriter(out / "quants.gguf", "llama")
    for kind in make_gguf.TYPES:
        if kind in make_gguf.HALVES or kind == make_gguf.T.Q8_K:
            columns = make_gguf.GGML_QUANT_SIZES[kind][0]
            writer.add_tensor(kind.name, make_gguf.random_blocks(kind, 1, columns), raw_dtype=kind)
        else:
            values = np.arange(8, dtype=np.float32).reshape(2, 4)
            writer.add_tensor(kind.name, make_gguf.quants.quantize(values, kind), raw_dtype=kind)
    make_gguf.finish(writer)
    writer = GGUFWriter(out / "metadata.gguf", "llama")
    for kind, value in (("uint8", 1), ("int8", -1), ("uint16", 2), ("int16", -2), ("uint32", 3),
                        ("int32", -3), ("uint64", 4), ("int64", -4), ("float32", 0.5),
                        ("float64", 0.25), ("bool", True), ("string", "text")):
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.nested", [[[1, 2], [3]], [[4]]])
    writer.add_array("test.bools", [True, False])
    writer.add_array("test.floats", [0.5, 1.5])
    make_gguf.finish(writer)


def make_configs():
    out = CORPUS / "model_config"
    base = make_gguf.base()
    ropes = [{"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0},
             {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
              "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.1, "mscale": 1.0,
              "mscale_all_dim": 0.5, "truncate": False},
             {"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [1, 2, 3, 4],
              "attention_factor": 1.0, "original_max_position_embeddings": 64}]
    for i, rope in enumerate(ropes):
        (out / f"rope{i}").write_text(json.dumps(base | {"model_type": "llama", "rope_scaling": rope}))
    (out / "rope_parameters").write_text(json.dumps(
        base | {"model_type": "qwen3", "rope_parameters": {"rope_type": "default",
                                                          "rope_theta": 1e6}, "dtype": "bfloat16"}))
    (out / "mistral").write_text(json.dumps(
        base | {"model_type": "mistral", "sliding_window": 4096,
                "architectures": ["MistralForCausalLM"]}))
    (out / "qwen2_window").write_text(json.dumps(
        base | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
                "layer_types": ["sliding_attention"] * 2}))
    (out / "generation").write_text(json.dumps(
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05,
         "repetition_penalty": 1.05, "eos_token_id": [1, 2], "bos_token_id": 0,
         "pad_token_id": None}))


if __name__ == "__main__":
    for name in ("safetensors", "gguf", "model_config"):
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
    make_safetensors()
    make_ggufs()
    make_configs()
