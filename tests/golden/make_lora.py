#!/usr/bin/env python3
"""A LoRA adapter on the golden model `llama` as PEFT saves it, and what PyTorch computes with it.

Written to FOLDER: adapter_config.json and adapter_model.safetensors by PeftModel.save_pretrained
(rank 4, alpha 6, all seven linear maps, A and B random), and golden.safetensors, in fp32 with one
thread: input_ids [B, T], logits [B, T, V], logprobs [B, T-1] of the next tokens, loss = mean of
their negatives, and the gradient of every A and B as `grad.NAME`, NAME as in the adapter's file.
Usage: make_lora.py MODELS_FOLDER FOLDER
"""

import pathlib
import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    models, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(
        models / "llama", torch_dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, lora_dropout=0.0,
                                            bias="none", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(17)
    parameters = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for p in parameters.values():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    model.peft_config["default"].base_model_name_or_path = "llama"
    model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    assert sorted(parameters) == sorted(get_peft_model_state_dict(model, save_embedding_layers=False))

    ids = load_file(models / "llama" / "golden.safetensors")["input_ids"].long()
    logits = model(input_ids=ids).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -logprobs.mean()
    loss.backward()
    values = {"input_ids": ids.int(), "logits": logits, "logprobs": logprobs, "loss": loss.reshape(1)}
    values.update({f"grad.{n}": p.grad for n, p in parameters.items()})
    save_file({n: v.detach().contiguous() for n, v in values.items()}, out / "golden.safetensors")


if __name__ == "__main__":
    main()
