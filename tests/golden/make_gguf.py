#!/usr/bin/env python3
"""Makes tests/golden/gguf/: GGUF files written and dequantised by llama.cpp's own Python package.

    pip install numpy gguf==0.19.0 && tests/golden/make_gguf.py

quants.gguf               one tensor of each type, named after it, of random blocks
quants.safetensors        what gguf.quants.dequantize makes of each, as f32
llama.gguf, qwen2.gguf, qwen3.gguf
                          tiny models with a tokenizer, tensors named and permuted as llama.cpp's
                          convert_hf_to_gguf.py does
llama/, qwen2/, qwen3/    the same models as Hugging Face folders

Q8_K is not known to the package; its formula (f32 scale times int8) is written out here.
"""
import json
import pathlib
import struct

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGML_QUANT_SIZES, GGUFWriter, RopeScalingType, quants

OUT = pathlib.Path(__file__).parent / "gguf"
RNG = np.random.default_rng(20240229)
TYPES = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0,
         T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_K]
# Where the f16 numbers lie in a block: random bytes would make them NaN or huge.
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
          T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in sorted(tensors.items()):
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def random_blocks(kind, rows, columns):
    """Rows of blocks with random quants and random finite scales, subnormal halves included."""
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = RNG.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for offset in HALVES.get(kind, []):
        scales = (RNG.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        scales[0] = np.float16(3e-7)
        blocks[:, offset:offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == T.Q8_K:
        scales = RNG.standard_normal(len(blocks)).astype(np.float32)
        blocks[:, :4] = scales.view(np.uint8).reshape(-1, 4)
    return blocks.reshape(rows, -1)


def dequantize(blocks, kind):
    if kind != T.Q8_K:
        return quants.dequantize(blocks, kind)
    flat = blocks.reshape(-1, 292)
    scale = flat[:, :4].copy().view(np.float32)
    return (scale * flat[:, 4:260].view(np.int8).astype(np.float32)).reshape(len(blocks), -1)


def make_quants():
    writer = GGUFWriter(OUT / "quants.gguf", "llama")
    writer.add_array("test.nested", [[1, 2], [3]])
    expected = {}
    for kind in TYPES:
        rows, columns = 3, 512
        if kind in HALVES or kind == T.Q8_K:
            stored = random_blocks(kind, rows, columns)
            expected[kind.name] = dequantize(stored, kind)
        else:
            values = RNG.standard_normal((rows, columns)).astype(np.float32)
            stored = quants.quantize(values, kind)
            expected[kind.name] = quants.dequantize(stored, kind)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
    finish(writer)
    write_safetensors(OUT / "quants.safetensors", expected)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(weights, heads):
    return (weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            .swapaxes(1, 2).reshape(weights.shape))


LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{suffix}"


def model_tensors(config, qkv_bias, o_bias, qk_norm):
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim, heads, kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (hidden,),
                   p + "post_attention_layernorm.weight": (hidden,),
                   p + "self_attn.q_proj.weight": (heads * dim, hidden),
                   p + "self_attn.k_proj.weight": (kv * dim, hidden),
                   p + "self_attn.v_proj.weight": (kv * dim, hidden),
                   p + "self_attn.o_proj.weight": (hidden, heads * dim),
                   p + "mlp.gate_proj.weight": (mlp, hidden), p + "mlp.up_proj.weight": (mlp, hidden),
                   p + "mlp.down_proj.weight": (hidden, mlp)}
        if qkv_bias:
            shapes |= {p + "self_attn.q_proj.bias": (heads * dim,),
                       p + "self_attn.k_proj.bias": (kv * dim,),
                       p + "self_attn.v_proj.bias": (kv * dim,)}
        if o_bias:
            shapes[p + "self_attn.o_proj.bias"] = (hidden,)
        if qk_norm:
            shapes |= {p + "self_attn.q_norm.weight": (dim,), p + "self_attn.k_norm.weight": (dim,)}
    # Multiples of 1/64: exact in f16, so that both files hold the same numbers.
    return {n: (RNG.integers(-64, 65, s) / 64).astype(np.float32) for n, s in sorted(shapes.items())}


def llama3_factors(config):
    rope, dim = config["rope_scaling"], config["head_dim"]
    factors = []
    for freq in 1.0 / config["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        wave, old = 2 * np.pi / freq, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (old / wave - low) / (high - low)
        factors.append(1.0 if wave < old / high else rope["factor"] if wave > old / low else
                       1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def make_model(arch, config, qkv_bias=False, o_bias=False, qk_norm=False):
    tensors = model_tensors(config, qkv_bias, o_bias, qk_norm)
    folder = OUT / arch
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": arch} | config, indent=2) + "\n")
    write_safetensors(folder / "model.safetensors", tensors)
    w = GGUFWriter(OUT / f"{arch}.gguf", arch)
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_rope_dimension_count(config["head_dim"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "yarn":
        w.add_rope_scaling_type(RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_tokenizer(w, config["vocab_size"])
    if rope.get("rope_type") == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(config))
    for name, value in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            value = permute(value, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            value = permute(value, config["num_key_value_heads"])
        w.add_tensor(gguf_name(name), value.astype(np.float16) if value.ndim == 2 else value)
    finish(w)


def add_tokenizer(w, vocab):
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list([f"t{i}" for i in range(vocab)])
    w.add_token_types([3] * 3 + [1] * (vocab - 3))
    w.add_token_merges(["t 1", "t 2", "t1 0"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_eot_token_id(0)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_add_bos_token(False)
    w.add_chat_template("{{ messages[0]['content'] }}")


def base(**other):
    return dict(vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_act="silu",
                max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
                tie_word_embeddings=True, bos_token_id=1, eos_token_id=[2, 0], pad_token_id=2,
                torch_dtype="float16") | other


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    make_quants()
    make_model("llama", base(attention_bias=True, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}), qkv_bias=True, o_bias=True)
    make_model("qwen2", base(tie_word_embeddings=False), qkv_bias=True)
    make_model("qwen3", base(head_dim=16, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        qk_norm=True)
