#!/usr/bin/env python3
"""Writes small random models as Hugging Face saves them, with the values transformers computes.

models/NAME/: config.json, generation_config.json, model.safetensors and golden.safetensors with
  input_ids    i32 [B, T]        two sequences: random ids, and a short motif that repeats
  lengths      i32 [B]           T each, nothing is padded
  logits       f32 [B, T, V]     eager attention, fp32
  logprobs     f32 [B, T-1]      log-softmax of logits[:, t] at input_ids[:, t+1]
  loss         f32 []            mean of -logprobs over all B * (T-1) positions
  grad.PARAM   f32               d loss / d PARAM by Hugging Face's parameter name, for each one
  logits.tN    f32 [B, N, V]     (dynamic RoPE) a forward of the first N tokens alone
Norm weights and biases are random too, so that a forgotten one shows.
Usage: make_models.py [OUTPUT_FOLDER]
"""

import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file

T = 40
COMMON = dict(num_hidden_layers=2, vocab_size=131, max_position_embeddings=64, rms_norm_eps=1e-5,
              rope_theta=10000.0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
WIDE = COMMON | dict(hidden_size=64, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2)
SLIM = COMMON | dict(hidden_size=48, intermediate_size=80, num_attention_heads=3, num_key_value_heads=1)
LLAMA = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
MISTRAL = (transformers.MistralConfig, transformers.MistralForCausalLM)
QWEN2 = (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
QWEN3 = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)

# The lengths are short so that T lies beyond them: a scaling left out is a wrong answer.
ROPE_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)
ROPE_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "llama": (LLAMA, WIDE),
    "smollm2": (LLAMA, SLIM | dict(tie_word_embeddings=True, rope_theta=100000.0)),
    "mistral": (MISTRAL, SLIM | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                     sliding_window=8)),
    "qwen2": (QWEN2, WIDE | dict(use_sliding_window=False, rms_norm_eps=1e-6, rope_theta=1000000.0)),
    "qwen3": (QWEN3, SLIM | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                 rms_norm_eps=1e-6, rope_theta=1000000.0)),
    "llama_rope_llama3": (LLAMA, SLIM | dict(rope_scaling=ROPE_LLAMA3, max_position_embeddings=256)),
    "llama_rope_linear": (LLAMA, SLIM | dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama_rope_dynamic": (LLAMA, SLIM | dict(rope_scaling=dict(rope_type="dynamic", factor=2.0),
                                              max_position_embeddings=16)),
    "llama_rope_yarn": (LLAMA, SLIM | dict(rope_scaling=ROPE_YARN, max_position_embeddings=64)),
}


def build(classes, config, seed):
    config_class, model_class = classes
    torch.manual_seed(seed)
    model = model_class._from_config(config_class(**config), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.3 * torch.randn(p.shape))
            elif name.endswith("bias"):
                p.copy_(0.5 * torch.randn(p.shape))
            elif "embed_tokens" in name:
                p.copy_(torch.randn(p.shape) * (0.3 if config["tie_word_embeddings"] else 1.0))
            else:
                p.copy_(1.3 * torch.randn(p.shape) / p.shape[1] ** 0.5)
    return model


def round_parameters(model):
    """Rounds the parameters alone: model.bfloat16() would round the rotary frequencies as well."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    return model


def inputs(vocab_size, seed):
    g = torch.Generator().manual_seed(seed)
    chance = torch.randint(3, vocab_size, (T,), generator=g)
    motif = torch.randint(3, vocab_size, (7,), generator=g).repeat(T // 7 + 1)[:T]
    chance[0] = motif[0] = 1
    return torch.stack([chance, motif])


def forward(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return logits, logprobs, -logprobs.mean()


def golden(model, seed, with_grads):
    ids = inputs(model.config.vocab_size, seed)
    model.zero_grad()
    logits, logprobs, loss = forward(model, ids)
    out = {"input_ids": ids.int(), "lengths": torch.full((2,), T, dtype=torch.int32),
           "logits": logits.detach(), "logprobs": logprobs.detach(), "loss": loss.detach()}
    if with_grads:
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.abs().max() > 1e-6, name
            out["grad." + name] = p.grad.detach().clone()
    return {k: v.contiguous() for k, v in out.items()}


def write(folder, model, values, **kw):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder, safe_serialization=True, **kw)
    save_file(values, folder / "golden.safetensors", metadata={"format": "pt"})
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:20s} {size:8d} bytes  loss {values['loss'].item():.6f}  "
          f"largest logit {values['logits'].abs().max().item():.3f}")


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "models"
    for i, (name, (classes, config)) in enumerate(MODELS.items()):
        model = build(classes, config, seed=1000 + i)
        values = golden(model, seed=2000 + i, with_grads=True)
        if "dynamic" in name:
            for n in (12, 24):
                fresh = build(classes, config, seed=1000 + i)
                ids = values["input_ids"][:, :n].long()
                values[f"logits.t{n}"] = forward(fresh, ids)[0].detach().contiguous()
        write(root / name, model, values)
        if name == "llama":
            write(root / "llama_sharded", model, golden(model, 2100, False), max_shard_size="170KB")
        if name == "smollm2":
            values = golden(round_parameters(model), 2101, False)
            write(root / "smollm2_bf16", model.bfloat16(), values)


if __name__ == "__main__":
    main()
