#!/usr/bin/env python3
"""GRPO on SmolLM2-135M from end to end, beside TRL's GRPOTrainer with its ordinary settings.

Both are given the same model folder (bf16), the same 8 prompts with 8 completions each a step, in the
same order, completions of the same length (least and greatest are equal), the same reward, learning
rate and AdamW, and the same processors. Both hold f32 weights, gradients of weights and moments, and compute in bf16:
TRL (1.16) by autocast, Stretto with a bf16 copy of the weights and bf16 gradients of activations
(`train.gradient_dtype`). The clock begins with the command: `stretto up`, or Python that imports TRL. Memory is what all processes of a run have resident at one time, sampled; a page that
two of them share counts twice.

Where a hypervisor hands out memory at its first use, as many virtual machines do, that costs seconds a gigabyte, which both
pay in their first step. So the first step is timed twice: as the machine is found, and once more for both just after memory
has been used, as it is on a machine of one's own.

  bench/e2e/e2e.py [--steps N] [--tokens N] [--processors N] [--only stretto|trl]

Installs torch, transformers and trl from PyPI into build/bench/venv. Writes build/bench/e2e.json,
both learning curves as build/bench/e2e.svg, and the figures of each run as
build/bench/e2e/{stretto,trl}.json, which --only reads back instead of running the other one.
"""
import argparse
import copy
import json
import mmap
import os
import shutil
import sqlite3
import statistics
import struct
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "rivals"))
from curves import write_svg  # noqa: E402
from rivals import PRODUCT, PYTHON, ROOT, Report, install, models, run  # noqa: E402

FOLDER = os.path.join(ROOT, "build/bench/e2e")
PACKAGES = ["accelerate", "datasets", "gguf", "torch", "transformers", "trl"]
SYSTEM = "You are a calculator. Reply with the result."
PROMPTS, GROUP, SEED, LEARNING_RATE = 8, 8, 1, 2e-5
WARM = 2  # steps that are not steady yet


def model_folder():
    """The model as a Hugging Face folder, which both read."""
    target = os.path.join(ROOT, "build/models/smollm2-e2e")
    if not os.path.exists(os.path.join(target, "tokenizer.json")):
        run(PYTHON, os.path.join(HERE, "to_folder.py"), models(), target)
    return target


def write_data(steps):
    """The first questions of the demo's data, as many as the steps need."""
    path = os.path.join(FOLDER, "prompts.jsonl")
    with open(os.path.join(ROOT, "examples/arithmetic/train.jsonl")) as source:
        lines = [json.loads(line) for line in source][:steps * PROMPTS]
    with open(path, "w") as out:
        for line in lines:
            messages = [{"role": "system", "content": SYSTEM}] + line["messages"]
            out.write(json.dumps({"messages": messages, "answer": line["answer"]}) + "\n")
    return path


def write_run_file(args, model, data):
    path = os.path.join(FOLDER, "run.yaml")
    with open(path, "w") as out:
        out.write(f"""run: {{name: e2e, seed: {SEED}, dir: {FOLDER}/run}}
model: {{path: {model}, max_sequence_length: 128}}
data: {{train: {data}, shuffle: false}}
rollout: {{group_size: {GROUP}, max_tokens: {args.tokens}, min_tokens: {args.tokens}}}
rewards: [{{type: integer, take: last}}]
algorithm: {{name: grpo}}
# AdamW as PyTorch has it by default.
train: {{steps: {args.steps}, prompts_per_step: {PROMPTS}, lr: {LEARNING_RATE}, warmup_steps: 0, beta2: 0.999, checkpoint_every: 0,
        gradient_dtype: bf16}}
schedule: {{max_staleness: 0}}
cluster: {{generator_threads: {args.processors}, trainer_threads: {args.processors}, scorer_threads: 1}}
""")
    return path


class Memory(threading.Thread):
    """Samples what a process and all that come from it have resident."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.root, self.peak, self.parts, self.ended = pid, 0, {}, threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            now = {pid: self.resident(pid) for pid in self.family()}
            if sum(now.values()) > self.peak:
                self.peak, self.parts = sum(now.values()), {self.name_of(pid): size for pid, size in now.items()}

    def family(self):
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as stat:
                        parents[int(name)] = int(stat.read().rsplit(")", 1)[1].split()[1])
                except OSError:
                    pass
        found = {self.root}
        while True:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            if not more:
                return found
            found |= more

    @staticmethod
    def name_of(pid):
        try:
            with open(f"/proc/{pid}/comm") as comm:
                return comm.read().strip()
        except OSError:
            return str(pid)

    @staticmethod
    def resident(pid):
        try:
            with open(f"/proc/{pid}/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except OSError:
            return 0


def watch(command, args, take_line):
    """Runs a command on the run's processors; when it began, and the peak of its memory."""
    chosen = sorted(os.sched_getaffinity(0))[:args.processors]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.processors), "HF_HUB_OFFLINE": "1"}
    begin = time.monotonic()
    with open(os.path.join(FOLDER, "errors.txt"), "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                                   preexec_fn=lambda: os.sched_setaffinity(0, chosen))
        memory = Memory(process.pid)
        memory.start()
        for line in process.stdout:
            take_line(line)
        memory.ended.set()
        if process.wait() != 0:
            sys.exit(f"{command[0]} failed; see {errors.name}")
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.parts.items())
    print(f"    peak memory, GB: {parts}", flush=True)
    return begin, memory.peak


def run_trl(args, model, data):
    settings = os.path.join(FOLDER, "trl-settings.json")
    with open(settings, "w") as out:
        json.dump({"model": model, "data": data, "folder": os.path.join(FOLDER, "trl"), "seed": SEED,
                   "threads": args.processors, "group_size": GROUP, "prompts_per_step": PROMPTS,
                   "steps": args.steps, "tokens": args.tokens, "lr": LEARNING_RATE}, out)
    ends, rewards = [], []

    def take(line):
        print("    trl:", line.strip(), flush=True)
        if line.startswith("step "):
            ends.append(float(line.split()[1]))
            rewards.append(float(line.split()[2]))

    begin, peak = watch([PYTHON, os.path.join(HERE, "trl_worker.py"), settings], args, take)
    return {"ends": [end - begin for end in ends], "rewards": rewards, "peak_bytes": peak}


def run_stretto(args, model, data):
    run_file = write_run_file(args, model, data)
    shutil.rmtree(os.path.join(FOLDER, "run"), ignore_errors=True)
    ends = []

    def take(line):
        print("    stretto:", line.strip(), flush=True)
        if line.startswith("step "):
            ends.append(time.monotonic())

    begin, peak = watch([os.path.join(PRODUCT, "stretto"), "up", run_file, "--plain"], args, take)
    with open(os.path.join(FOLDER, "run/metrics.jsonl")) as lines:
        steps = [json.loads(line) for line in lines]
    return {"ends": [end - begin for end in ends], "rewards": [step["reward_mean"] for step in steps],
            "peak_bytes": peak}


def check_prompts(model, data):
    """Ends the script when the two did not see the same token ids."""
    journal = sqlite3.connect(os.path.join(FOLDER, "run/run.sqlite"))
    rows = journal.execute("SELECT ids FROM prompts WHERE epoch = 0 ORDER BY line").fetchall()
    seen = [list(struct.unpack(f"<{len(ids) // 4}i", ids)) for (ids,) in rows]
    script = ("import json, sys\nfrom transformers import AutoTokenizer\n"
              "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
              "for line in open(sys.argv[2]):\n"
              "    print(json.dumps(t.apply_chat_template(json.loads(line)['messages'], tokenize=True,\n"
              "                     add_generation_prompt=True, return_dict=False)))\n")
    out = run(PYTHON, "-c", script, model, data, capture_output=True, text=True).stdout
    expected = [json.loads(line) for line in out.splitlines()]
    if seen != expected[:len(seen)]:
        sys.exit("the prompts' token ids differ between the two")
    print(f"  {len(seen)} prompts have the same token ids in both")


def use_memory():
    """Half of what is free, once: the machine has it at hand then for whoever comes next."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    with mmap.mmap(-1, available // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(memory), 4096):
            memory[at] = 1


def first_step_with_used_memory(args, run_one, model, data):
    one = copy.copy(args)
    one.steps = 1
    use_memory()
    return run_one(one, model, data)["ends"][0]


def steady(result):
    """Seconds of the median step once the first ones are over."""
    ends = result["ends"][WARM - 1:]
    return statistics.median(b - a for a, b in zip(ends, ends[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="of every completion")
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("--only", choices=["stretto", "trl"], help="runs one and reads the other's figures")
    args = parser.parse_args()
    install(PACKAGES)
    os.makedirs(FOLDER, exist_ok=True)
    model, data = model_folder(), write_data(args.steps)
    results = {}
    for name, run_one in (("stretto", run_stretto), ("trl", run_trl)):
        kept = os.path.join(FOLDER, name + ".json")
        if args.only in (None, name):
            result = run_one(args, model, data)
            if name == "stretto":
                check_prompts(model, data)
            result["first_with_used_memory"] = first_step_with_used_memory(args, run_one, model, data)
            with open(kept, "w") as out:
                json.dump({**result, "steps": args.steps, "tokens": args.tokens}, out)
        with open(kept) as file:
            results[name] = json.load(file)
    stretto, trl = results["stretto"], results["trl"]
    if any(r["steps"] != args.steps or r["tokens"] != args.tokens for r in results.values()):
        sys.exit("the figures kept are of other steps or tokens: run both")
    report = Report("e2e")
    print(f"GRPO, {PROMPTS} prompts x {GROUP} completions of {args.tokens} tokens, {args.processors} processors")
    for name, result in (("stretto", stretto), ("TRL", trl)):
        report.add(f"{name}, steady step", steady(result), "s")
        report.add(f"{name}, from the command to the first step's end", result["ends"][0], "s")
        report.add(f"{name}, the same with memory used before", result["first_with_used_memory"], "s")
        report.add(f"{name}, peak memory of all processes", result["peak_bytes"] / 1e9, "GB")
        report.add(f"{name}, reward of the last 4 steps", statistics.mean(result["rewards"][-4:]), "")
    report.add("steady step: times TRL", steady(trl) / steady(stretto), "x", 5)
    report.add("first step's end: times TRL", trl["ends"][0] / stretto["ends"][0], "x", 10)
    report.add("the same with memory used before: times TRL",
               trl["first_with_used_memory"] / stretto["first_with_used_memory"], "x", 10)
    report.add("peak memory, of TRL's", stretto["peak_bytes"] / trl["peak_bytes"], "x", 0.5, True)
    report.write()
    write_svg(os.path.join(ROOT, "build/bench/e2e.svg"), {"Stretto": stretto, "TRL": trl})


if __name__ == "__main__":
    main()
