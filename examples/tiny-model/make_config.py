#!/usr/bin/env python3
"""Writes the tiny model's config.json and byte-level tokenizer.json beside this script.

The weights come from examples/tiny-model/train, which runs `stretto sft` from random weights.
"""
import json
import pathlib

HERE = pathlib.Path(__file__).parent
SPECIAL = ["<|endoftext|>"]


def byte_characters():
    """GPT-2's printable stand-ins for the 256 bytes."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    characters, shift = {}, 0
    for byte in range(256):
        if byte in keep:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(256 + shift)
            shift += 1
    return [characters[b] for b in range(256)]


def main():
    vocab = {token: i for i, token in enumerate(SPECIAL + byte_characters())}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": token, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}
                         for i, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocab),
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": None, "eos_token_id": 0, "torch_dtype": "bfloat16",
    }
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0],
                        "model_max_length": 256}
    for name, value in [("tokenizer.json", tokenizer), ("config.json", config),
                        ("tokenizer_config.json", tokenizer_config)]:
        (HERE / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n",
                                 encoding="utf-8")


if __name__ == "__main__":
    main()
