"""Hugging Face generate as a worker of rivals.py: transformers_worker.py MODEL THREADS.

In bf16 where the processor multiplies bf16 itself; elsewhere in f32, which is several times faster
there.
"""
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def best_dtype():
    with open("/proc/cpuinfo") as info:
        flags = info.read()
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def measure(model, sequences, prompt, new):
    ids = torch.tensor([[(s * 7919 + i * 31) % 49152 for i in range(prompt)] for s in range(sequences)])
    begin = time.monotonic()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                         do_sample=True, top_k=0, pad_token_id=0)
    seconds = time.monotonic() - begin
    if out.shape[1] != prompt + new:
        sys.exit("generate wrote %d tokens" % (out.shape[1] - prompt))
    return 0.0, seconds, sequences * new  # of one call the phases can't be told apart


def main():
    path, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    folder, file = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, torch_dtype=best_dtype())
    model.eval()
    print("ready", flush=True)
    for line in sys.stdin:
        _, sequences, prompt, new = line.split()
        print("%.6f %.6f %d" % measure(model, int(sequences), int(prompt), int(new)), flush=True)


main()
