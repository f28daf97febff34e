#!/usr/bin/env python3
"""Writes the values and gradients of a critic: models/NAME with a value head in place of its LM head.

critic.NAME.safetensors for each NAME:
  input_ids, old_values, returns  of two sequences; old_values and returns f32 [B, T-1]
  score.weight                    f32 [1, D], the head
  values       f32 [B, T-1]       head(hidden state), of all rows but the last
  loss         f32 []             mean of max((v - R)^2, (clip(v, v_old - 0.2, v_old + 0.2) - R)^2) / 2
  grad.PARAM   f32                d loss / d PARAM
Usage: make_critic.py MODELS_FOLDER OUTPUT_FOLDER
"""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    models, out_folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    for i, name in enumerate(["smollm2", "qwen2"]):
        model = transformers.AutoModel.from_pretrained(models / name, attn_implementation="eager").float().eval()
        ids = load_file(models / name / "golden.safetensors")["input_ids"]
        generator = torch.Generator().manual_seed(3000 + i)
        head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / 8)
        hidden = model(input_ids=ids.long(), use_cache=False).last_hidden_state
        values = head(hidden)[..., 0][:, :-1]
        old = (values + 0.3 * torch.randn(values.shape, generator=generator)).detach()
        returns = (values + torch.randn(values.shape, generator=generator)).detach()
        clipped = torch.clamp(values, old - 0.2, old + 0.2)
        loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
        loss.backward()
        out = {"input_ids": ids, "old_values": old, "returns": returns, "values": values.detach(),
               "loss": loss.detach(), "score.weight": head.weight.detach(), "grad.score.weight": head.weight.grad}
        for parameter, p in model.named_parameters():
            assert p.grad is not None and p.grad.abs().max() > 1e-6, parameter
            out["grad.model." + parameter] = p.grad
        path = out_folder / f"critic.{name}.safetensors"
        save_file({k: v.contiguous() for k, v in out.items()}, path, metadata={"format": "pt"})
        print(f"{name:10s} {path.stat().st_size:8d} bytes  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
