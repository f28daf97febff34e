"""PyTorch's training step as a worker of trainer_rivals.py: torch_trainer_worker.py THREADS LAYERS.

Hugging Face's Llama with SmolLM2-135M's shape and random weights, PyTorch's own attention and AdamW. In
bf16 where the processor multiplies bf16 itself (weights and moments are bf16 too, without f32 masters,
which favours it); elsewhere in f32, since bf16 takes it minutes a step there.
"""
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 49152


def best_dtype():
    with open("/proc/cpuinfo") as info:
        flags = info.read()
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def make_model(layers, dtype):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
                         num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
                         rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True, use_cache=False,
                         attn_implementation="sdpa")
    return LlamaForCausalLM(config).to(dtype).train()


def log_probs(model, ids, first):
    """Of ids[:, first:], from the logits of the rows before them alone."""
    count = ids.shape[1] - first
    logits = model(ids[:, :-1], logits_to_keep=count).logits.float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, first:, None]).squeeze(-1)


def main():
    threads, layers = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    model = make_model(layers, best_dtype())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    supervised = torch.randint(VOCABULARY, (8, 256))
    prompts = torch.randint(VOCABULARY, (8, 1, 128)).expand(8, 8, 128).reshape(64, 128)
    groups = torch.cat([prompts, torch.randint(VOCABULARY, (64, 32))], 1)
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        if line.strip() == "groups":
            # Eight sequences at a time, as a trainer with bounded memory does.
            for part in groups.split(8):
                (-log_probs(model, part, 128).sum() / (64 * 32)).backward()
            tokens = groups.numel()
        else:
            (-log_probs(model, supervised, 1).mean()).backward()
            tokens = supervised.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print("%.6f %d" % (time.monotonic() - begin, tokens), flush=True)


main()
