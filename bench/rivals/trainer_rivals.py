#!/usr/bin/env python3
"""Compares training steps with PyTorch on SmolLM2-135M's shape: forward, backward and AdamW.

Each trainer is a process of its own that waits while another is timed; they take turns. Two batches:
8 sequences of 256 tokens, and 8 prompts of 128 tokens with 8 completions of 32 each, whose shared
prompts PyTorch computes once for every completion. PyTorch runs twice: as it was installed, and with
an allocator that keeps large blocks (glibc gives them back to the system after every use by default).

  bench/rivals/trainer_rivals.py [--threads N] [--rounds N] [--layers N]

Installs torch and transformers from PyPI into build/bench/venv. Writes
build/bench/trainer_rivals.json.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

from rivals import HERE, PRODUCT, PYTHON, ROOT, Report, install

KEEP_BLOCKS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}


class Worker:
    """A trainer in a process: `supervised` or `groups` is one step, and gives seconds and tokens."""

    def __init__(self, name, command, environment=None):
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **(environment or {})})
        if not any(line.strip() == "ready" for line in iter(self.process.stdout.readline, "")):
            sys.exit(f"{name} did not start")

    def step(self, kind):
        self.process.stdin.write(kind + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended")
        seconds, tokens = line.split()
        return int(tokens) / float(seconds)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(report, product, rivals, kind, label, rounds):
    """rivals: (worker, the least number of times that the product is to be as fast)."""
    workers = [product] + [worker for worker, _ in rivals]
    speeds = {worker: [] for worker in workers}
    for round_number in range(rounds + 1):  # the first warms up
        for worker in workers:
            speed = worker.step(kind)
            print(f"    {worker.name}: {speed:.1f} tokens/s", flush=True)
            if round_number > 0:
                speeds[worker].append(speed)
    for worker in workers:
        report.add(f"{worker.name}, {label}", statistics.median(speeds[worker]), "tokens/s")
    for worker, target in rivals:
        ratios = [a / b for a, b in zip(speeds[product], speeds[worker])]
        report.add(f"{label}: times {worker.name}", statistics.median(ratios), "x", target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    args = parser.parse_args()
    install(["torch", "transformers"])
    report = Report("trainer_rivals")
    print(f"training steps beside PyTorch's, {args.threads} threads, {args.layers} layers", flush=True)
    binary = [os.path.join(PRODUCT, "bench_trainer"), "--worker", f"--threads={args.threads}",
              f"--layers={args.layers}"]
    # PyTorch's gradients are bf16, too.
    product = Worker("stretto", [*binary, "--gradient-dtype=bf16"])
    exact = Worker("stretto, gradients of activations in f32", binary)
    command = [PYTHON, os.path.join(HERE, "torch_trainer_worker.py"), str(args.threads), str(args.layers)]
    installed = Worker("PyTorch as installed", command)
    tuned = Worker("PyTorch, allocator tuned", command, KEEP_BLOCKS)
    rivals = [(exact, None), (installed, 2.0), (tuned, 1.3)]
    compare(report, product, rivals, "supervised", "8 x 256 tokens", args.rounds)
    rivals = [(exact, None), (installed, 4.0), (tuned, None)]
    compare(report, product, rivals, "groups", "8 x 8 x (128 + 32) tokens", args.rounds)
    for worker in (product, exact, installed, tuned):
        worker.close()
    report.write()


if __name__ == "__main__":
    main()
