#!/usr/bin/env python3
"""Compares an exported adapter, as PEFT loads and applies it, with the merged model of the same run.

BASE and MERGED are Hugging Face folders (`stretto export --dtype f32 RUN MERGED`, or --out of
`stretto sft`), ADAPTER is a PEFT folder (`stretto export --adapter RUN ADAPTER`, or --adapter-out).
Both are computed in fp32 by transformers on the same random ids; PEFT must find every tensor.
Prints the largest difference of logits, the largest logit, and how far the base alone is away.
Exit code: 0 the logits agree to --tolerance of the largest logit, 1 they don't.
Usage: check_adapter.py --base BASE --adapter ADAPTER --merged MERGED [--tolerance 1e-4]
"""

import argparse
import sys
import warnings

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()


def main():
    parser = argparse.ArgumentParser()
    for name in ("--base", "--adapter", "--merged"):
        parser.add_argument(name, required=True)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    base = load(args.base)
    ids = torch.randint(base.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a key that is missing is a warning of PEFT's
            adapted = PeftModel.from_pretrained(base, args.adapter).eval()
        from_adapter = adapted(input_ids=ids).logits
        merged = load(args.merged)(input_ids=ids).logits
    largest = merged.abs().max().item()
    difference = (from_adapter - merged).abs().max().item()
    print(f"largest logit {largest:.4g}, difference {difference:.3g}, base alone {(plain - merged).abs().max().item():.3g}")
    sys.exit(0 if difference <= args.tolerance * largest else 1)


if __name__ == "__main__":
    main()
