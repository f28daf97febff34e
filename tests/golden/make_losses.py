#!/usr/bin/env python3
"""Writes losses.json: losses, advantages and optimizer steps on small inputs, by PyTorch autograd.

The formulas follow the definitions in TRL's GRPOTrainer and the papers it names (GRPO
arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783). Everything is float64 except
AdamW, which is torch.optim.AdamW in float32. README.md in this folder describes the layout.
Usage: make_losses.py [OUTPUT_FILE]
"""

import itertools
import json
import math
import pathlib
import sys

import torch

MAX_LENGTH = 10  # Dr. GRPO's constant: the largest completion length of the run


def rollouts(seed, spread):
    """Six completions of unequal length, two groups; -spread is the noise of old against new."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for length, num_masked in [(7, 0), (1, 0), (10, 2), (4, 4), (9, 1), (5, 0)]:
        logp = -torch.rand(length, generator=g) * 3 - 0.05
        old = logp + spread * torch.randn(length, generator=g)
        ref = logp + 0.5 * torch.randn(length, generator=g)
        sampler = old + 0.4 * torch.randn(length, generator=g)
        mask = torch.ones(length)
        mask[torch.randperm(length, generator=g)[:num_masked]] = 0
        advantage = torch.randn((), generator=g)
        out.append({k: v.double() for k, v in dict(logp=logp, old_logp=old, ref_logp=ref, sampler_logp=sampler,
                                                   mask=mask, advantage=advantage).items()})
    return out


def reduce(losses, masks, kind):
    total = sum((x * m).sum() for x, m in zip(losses, masks))
    if kind == "sequence_mean":  # TRL "grpo"
        means = [(x * m).sum() / m.sum().clamp(min=1) for x, m in zip(losses, masks)]
        return sum(means) / len(means)
    if kind == "token_mean":  # TRL "bnpo", and "dapo" over the whole step
        return total / sum(m.sum() for m in masks).clamp(min=1)
    assert kind == "constant"  # TRL "dr_grpo"
    return total / (len(losses) * MAX_LENGTH)


def objective(rows, logps, kind, clip_low, clip_high, beta, tis_cap):
    losses, kls, lows, highs = [], [], [], []
    for r, logp in zip(rows, logps):
        a, ratio = r["advantage"], torch.exp(logp - r["old_logp"])
        clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
        loss = -torch.min(ratio * a, clipped * a)
        if tis_cap is not None:
            loss = loss * torch.clamp(torch.exp(r["old_logp"] - r["sampler_logp"]), max=tis_cap)
        log_ref = r["ref_logp"] - logp
        kl = torch.exp(log_ref) - log_ref - 1
        losses.append(loss + beta * kl)
        kls.append(kl)
        lows.append(((ratio < 1 - clip_low) & (a < 0)).double())
        highs.append(((ratio > 1 + clip_high) & (a > 0)).double())
    masks = [r["mask"] for r in rows]
    mean = [float(reduce(x, masks, "token_mean")) for x in (kls, lows, highs)]
    return reduce(losses, masks, kind), dict(mean_kl=mean[0], clip_low_fraction=mean[1], clip_high_fraction=mean[2])


def grpo_cases():
    cases = []
    settings = [("token_mean", 0.2, 0.2, 0.04, None), ("sequence_mean", 0.2, 0.2, 0.04, None),
                ("constant", 0.2, 0.2, 0.04, None), ("token_mean", 0.2, 0.28, 0.0, None),
                ("token_mean", 0.1, 0.3, 1.0, None), ("token_mean", 0.2, 0.2, 0.04, 2.0)]
    for i, ((kind, low, high, beta, cap), spread) in enumerate(itertools.product(settings, [0.0, 0.5])):
        rows = rollouts(100 + i, spread)
        logps = [r["logp"].clone().requires_grad_() for r in rows]
        loss, metrics = objective(rows, logps, kind, low, high, beta, cap)
        grads = torch.autograd.grad(loss, logps)
        cases.append(dict(
            reduction=kind, clip_low=low, clip_high=high, beta=beta, tis_cap=cap, max_length=MAX_LENGTH,
            rollouts=[{k: v.tolist() for k, v in r.items()} for r in rows],
            loss=float(loss), grad_logp=[x.tolist() for x in grads], **metrics))
    return cases


def advantage_cases():
    g = torch.Generator().manual_seed(7)
    groups = [torch.tensor([1.0, 0, 0, 1]), torch.tensor([0.0, 0, 0, 0]), torch.tensor([1.0, 1, 1, 1]),
              torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1]), torch.randn(8, generator=g), torch.tensor([2.5, -2.5]),
              torch.randn(5, generator=g) * 100]
    cases = []
    for rewards in (x.double() for x in groups):
        centred = rewards - rewards.mean()
        n = len(rewards)
        cases.append(dict(
            rewards=rewards.tolist(), mean=float(rewards.mean()), std=float(rewards.std()),
            std_population=float(rewards.std(correction=0)), epsilon=1e-4, centred=centred.tolist(),
            normalized=(centred / (rewards.std() + 1e-4)).tolist(),
            normalized_population=(centred / (rewards.std(correction=0) + 1e-4)).tolist(),
            leave_one_out=(rewards - (rewards.sum() - rewards) / (n - 1)).tolist()))
    return cases


def adamw_cases():
    cases = []
    for i, (lr, beta2, decay) in enumerate([(1e-3, 0.95, 0.0), (1e-2, 0.999, 0.1), (1e-6, 0.95, 0.0)]):
        g = torch.Generator().manual_seed(40 + i)
        param = torch.randn(3, 4, generator=g).requires_grad_()
        case = dict(lr=lr, beta1=0.9, beta2=beta2, epsilon=1e-8, weight_decay=decay, param=param.detach().flatten().tolist(), steps=[])
        optimizer = torch.optim.AdamW([param], lr=lr, betas=(0.9, beta2), eps=1e-8, weight_decay=decay, foreach=False)
        for step in range(3):
            param.grad = torch.randn(3, 4, generator=g) * 10.0 ** (step - 1)
            param.grad[0, 0] = 0
            optimizer.step()
            state = optimizer.state[param]
            case["steps"].append({k: v.detach().flatten().tolist() for k, v in dict(
                grad=param.grad, param=param, exp_avg=state["exp_avg"], exp_avg_sq=state["exp_avg_sq"]).items()})
        cases.append(case)
    return cases


def clip_cases():
    cases = []
    for i, (scale, max_norm) in enumerate([(3.0, 1.0), (0.01, 1.0), (0.0, 1.0), (1.0, 0.5), (1e4, 1.0)]):
        g = torch.Generator().manual_seed(60 + i)
        params = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (5, 1, 12)]
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).double() * scale
        before = [p.grad.tolist() for p in params]
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=False)
        cases.append(dict(max_norm=max_norm, grads=before, norm=float(norm), clipped=[p.grad.tolist() for p in params]))
    return cases


def softmax_cases():
    cases = []
    for i, (size, scale, temperature) in enumerate([(5, 1.0, 1.0), (11, 4.0, 0.7), (11, 30.0, 1.0), (7, 0.0, 1.3), (1, 1.0, 1.0), (64, 3.0, 2.0)]):
        g = torch.Generator().manual_seed(80 + i)
        logits = (torch.randn(size, generator=g).double() * scale).requires_grad_()
        token = size // 2
        logp = torch.log_softmax(logits / temperature, -1)
        entropy = -(logp.exp() * logp).sum()
        cases.append(dict(
            logits=logits.tolist(), temperature=temperature, token=token, logprob=float(logp[token]), entropy=float(entropy),
            grad_logprob=torch.autograd.grad(logp[token], logits, retain_graph=True)[0].tolist(),
            grad_entropy=torch.autograd.grad(entropy, logits)[0].tolist()))
    return cases


def kl_cases():
    g = torch.Generator().manual_seed(90)
    logp = (-torch.rand(12, generator=g).double() * 4).requires_grad_()
    ref = logp.detach() + torch.randn(12, generator=g).double()
    ref[0] = logp.detach()[0]
    d = logp - ref
    estimators = dict(k1=d, k2=d * d / 2, k3=torch.exp(-d) + d - 1)
    return dict(logp=logp.tolist(), ref_logp=ref.tolist()) | {
        name: dict(value=v.tolist(), grad=torch.autograd.grad(v.sum(), logp, retain_graph=True)[0].tolist())
        for name, v in estimators.items()}


def main():
    torch.set_num_threads(1)
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "losses.json"
    data = dict(grpo=grpo_cases(), advantages=advantage_cases(), adamw=adamw_cases(), clip_grad_norm=clip_cases(),
                softmax=softmax_cases(), kl=kl_cases())
    for case in data["grpo"]:
        assert math.isfinite(case["loss"])
    path.write_text(json.dumps(data, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")
    print(path.name, path.stat().st_size, "bytes", {k: len(v) for k, v in data.items()},
          [(c["reduction"], round(c["loss"], 5), round(c["clip_low_fraction"], 3), round(c["clip_high_fraction"], 3)) for c in data["grpo"]])


if __name__ == "__main__":
    main()
