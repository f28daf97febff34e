"""The same run by TRL's GRPOTrainer: trl_worker.py SETTINGS, a JSON file that bench/e2e/e2e.py writes.

Everything that the settings don't fix is as TRL has it by default (f32 weights, computing in bf16 by autocast; gradient
checkpointing; micro-batches of 8). Prints `step SECONDS REWARD` after
each optimizer step, seconds of the monotonic clock.
"""
import json
import re
import sys
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


# A sign belongs to a number where no digit, letter or ')' stands before it, as in services/common/numbers.h.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def last_integer_is_answer(completions, answer, **_):
    """1 if the last number of a completion is the answer, as the run file's `integer, take: last`."""
    rewards = []
    for completion, right in zip(completions, answer):
        found = NUMBER.findall(completion[0]["content"])
        rewards.append(1.0 if found and float(found[-1].replace(",", "")) == int(right) else 0.0)
    return rewards


class Steps(TrainerCallback):
    """Times of steps. The reward of a step is known when its log comes, after the step's end."""

    def __init__(self):
        self.ended = None

    def on_step_end(self, args, state, control, **_):
        self.ended = time.monotonic()

    def on_log(self, args, state, control, logs=None, **_):
        if self.ended is not None and "reward" in logs:
            print("step %.6f %.6f" % (self.ended, logs["reward"]), flush=True)


def main():
    with open(sys.argv[1]) as file:
        s = json.load(file)
    torch.set_num_threads(s["threads"])
    with open(s["data"]) as file:
        lines = [json.loads(line) for line in file]
    data = Dataset.from_list([{"prompt": line["messages"], "answer": line["answer"]} for line in lines])
    config = GRPOConfig(
        output_dir=s["folder"], seed=s["seed"], use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1, shuffle_dataset=False,
        # The run: the same batch in TRL's own micro-batches (8 of 8 completions), the same optimizer.
        num_generations=s["group_size"], gradient_accumulation_steps=s["prompts_per_step"],
        max_steps=s["steps"], learning_rate=s["lr"], lr_scheduler_type="constant",
        max_completion_length=s["tokens"], generation_kwargs={"min_new_tokens": s["tokens"]})
    steps = Steps()
    trainer = GRPOTrainer(model=s["model"], reward_funcs=last_integer_is_answer, args=config, train_dataset=data,
                          callbacks=[steps])
    print("settings", config.per_device_train_batch_size, config.gradient_accumulation_steps, config.bf16,
          config.gradient_checkpointing, config.beta, config.loss_type, next(trainer.model.parameters()).dtype,
          flush=True)
    trainer.train()


main()
