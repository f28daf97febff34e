"""Writes a Llama GGUF file as a Hugging Face folder in bf16: to_folder.py SOURCE TARGET."""
import os
import re
import sys

import gguf
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def folder_name(name):
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{NAMES[layer[2]]}.weight"
    return NAMES[name.removesuffix(".weight")] + ".weight"


def halves(weight, heads):
    """GGUF has the two halves of each head's rows that rope pairs interleaved."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def main():
    source, target = sys.argv[1:]
    where = {"pretrained_model_name_or_path": os.path.dirname(source), "gguf_file": os.path.basename(source)}
    config = AutoConfig.from_pretrained(**where)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.GGUFReader(source).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(values.copy()).reshape([int(n) for n in reversed(tensor.shape)])
        kind = tensor.name.split(".")[-2]
        weights[folder_name(tensor.name)] = halves(weight, heads[kind]) if kind in heads else weight
    model = LlamaForCausalLM(config)
    lacking = model.load_state_dict(weights, strict=False)
    if lacking.unexpected_keys or any(key != "lm_head.weight" for key in lacking.missing_keys):
        sys.exit(f"{source}: {lacking}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


main()
