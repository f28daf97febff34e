#!/usr/bin/env python3
"""Writes trl_losses.json: losses and gradients on random inputs by TRL's own functions.

GRPO, RLOO, DPO and the reward model come from the TRL that Python finds, by calling the trainers' loss
methods with a stub in place of the trainer: GRPOTrainer._compute_loss, RLOOTrainer._compute_loss,
DPOTrainer.dpo_loss, RewardTrainer.compute_loss. PPO comes from the last TRL that has it apart from its
loop, 0.11.4, in a folder of its own: PPOTrainer.compute_rewards, .compute_advantages, .loss and
AdaptiveKLController. Everything is float64 on inputs that float32 holds. README.md has the layout.
Usage: make_trl_losses.py FOLDER_WITH_TRL_0_11_4 [OUTPUT_FILE]
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import types

import torch

LENGTHS = [6, 1, 4, 0, 5, 3]  # a row of length 0 is all padding
TIME = max(LENGTHS)
MAX_LENGTH = 8


def rounded(x):
    """What the file holds and, as float32, what is computed with."""
    values = torch.round(x.double() * 1000) / 1000
    return values.float().double()


def short(x):
    """Inputs as written: three decimals."""
    return [short(row) for row in x] if x.dim() > 1 else [round(float(v), 3) for v in x]


def digits(x):
    """Results as written: 12 significant digits."""
    return [digits(row) for row in x] if x.dim() > 0 else float(f"{float(x):.12g}")


def normal(g, *shape, scale=1.0):
    return torch.randn(*shape, generator=g) * scale


def completions(seed, spread):
    g = torch.Generator().manual_seed(seed)
    n = len(LENGTHS)
    logp = rounded(-torch.rand(n, TIME, generator=g) * 3 - 0.05)
    rows = dict(
        logp=logp, old_logp=rounded(logp + normal(g, n, TIME, scale=spread)), ref_logp=rounded(logp + normal(g, n, TIME, scale=0.5)),
        sampler_logp=rounded(logp + normal(g, n, TIME, scale=0.6)), advantage=rounded(normal(g, n)))
    return rows, torch.tensor([[float(t < length) for t in range(TIME)] for length in LENGTHS], dtype=torch.float64)


def stub(**attributes):
    accelerator = types.SimpleNamespace(gather=lambda x: x, num_processes=1, device=torch.device("cpu"))
    metrics = collections.defaultdict(lambda: collections.defaultdict(list))
    return types.SimpleNamespace(accelerator=accelerator, model=types.SimpleNamespace(training=True), _metrics=metrics, **attributes)


def policy_inputs(rows, mask):
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids, completion_mask=mask, advantages=rows["advantage"],
                old_per_token_logps=rows["old_logp"], ref_per_token_logps=rows["ref_logp"], old_logps=(rows["old_logp"] * mask).sum(-1),
                importance_sampling_ratio=None, num_items_in_batch=mask.sum())


def grpo_case(rows, mask, loss_type, level, low, high, delta, beta, cap):
    from trl.trainer.grpo_trainer import GRPOTrainer

    logp = rows["logp"].clone().requires_grad_()
    inputs = policy_inputs(rows, mask)
    if cap is not None:
        inputs["importance_sampling_ratio"] = torch.clamp(torch.exp(rows["old_logp"] - rows["sampler_logp"]), max=cap)
    trainer = stub(top_entropy_quantile=1.0, beta=beta, importance_sampling_level=level, epsilon_low=low, epsilon_high=high,
                   args=types.SimpleNamespace(delta=delta), use_vllm=cap is not None, vllm_importance_sampling_correction=True,
                   loss_type=loss_type, current_gradient_accumulation_steps=1, max_completion_length=MAX_LENGTH,
                   _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp)))
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    metrics = {k: v[0] for k, v in trainer._metrics["train"].items()}
    return dict(loss_type=loss_type, level=level, clip_low=low, clip_high=high, delta=delta, beta=beta, cap=cap, loss=digits(loss),
                grad=digits(torch.autograd.grad(loss, logp)[0]), clip_low_fraction=metrics["clip_ratio/low_mean"],
                clip_high_fraction=metrics["clip_ratio/high_mean"], kl=metrics.get("kl"))


def grpo_section():
    settings = [
        ("grpo", "token", 0.2, 0.2, None, 0.04, None), ("bnpo", "token", 0.2, 0.2, None, 0.04, None),
        ("dr_grpo", "token", 0.2, 0.2, None, 0.04, None), ("dapo", "token", 0.2, 0.28, None, 0.0, None),
        ("dapo", "token", 0.1, 0.3, 1.5, 0.1, None), ("bnpo", "token", 0.2, 0.28, 3.0, 0.0, 2.0),
        ("grpo", "token", 0.2, 0.2, None, 0.04, 1.2), ("dr_grpo", "token", 0.2, 0.2, 1.5, 1.0, 1.2),
        ("grpo", "sequence", 0.2, 0.2, None, 0.0, None), ("grpo", "sequence", 0.05, 0.1, None, 0.04, None),
        ("dapo", "sequence", 0.2, 0.28, 1.4, 0.04, 1.5), ("dr_grpo", "sequence", 0.02, 0.03, None, 0.0, 1.5)]
    batches = []
    for seed, spread in [(1, 0.4), (2, 1.5)]:
        rows, mask = completions(seed, spread)
        batches.append(dict(rows={k: short(v) for k, v in rows.items()}, cases=[grpo_case(rows, mask, *s) for s in settings]))
    return batches


def rloo_section():
    from trl.trainer.rloo_trainer import RLOOTrainer

    batches = []
    for seed, spread, low, high in [(3, 0.1, 0.2, 0.2), (4, 0.4, 0.2, 0.28), (5, 0.0, 0.2, 0.2)]:
        rows, mask = completions(seed, spread)
        logp = rows["logp"].clone().requires_grad_()
        trainer = stub(epsilon_low=low, epsilon_high=high,
                       _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp)))
        loss = RLOOTrainer._compute_loss(trainer, None, policy_inputs(rows, mask))
        batches.append(dict(rows={k: short(v) for k, v in rows.items()}, clip_low=low, clip_high=high, loss=digits(loss),
                            grad=digits(torch.autograd.grad(loss, logp)[0])))
    return batches


def dpo_section():
    from trl.trainer.dpo_trainer import DPOTrainer

    cases = []
    settings = [("sigmoid", 0.1, 0.0, False), ("sigmoid", 0.5, 0.1, False), ("sigmoid", 0.1, 0.0, True), ("sigmoid", 0.3, 0.2, True),
                ("ipo", 0.1, 0.0, False), ("ipo", 0.4, 0.0, True)]
    for i, (kind, beta, smoothing, reference_free) in enumerate(settings):
        g = torch.Generator().manual_seed(20 + i)
        scale = 1.0 if kind == "ipo" else 30.0
        chosen, rejected = (rounded(-torch.rand(5, generator=g) * scale).requires_grad_() for _ in range(2))
        ref_chosen, ref_rejected = (rounded(x.detach() + normal(g, 5, scale=scale / 10)) for x in (chosen, rejected))
        trainer = stub(reference_free=reference_free, f_divergence_type="reverse_kl", f_divergence_params=None, beta=beta,
                       label_smoothing=smoothing)
        losses, chosen_rewards, rejected_rewards = DPOTrainer.dpo_loss(trainer, chosen, rejected, ref_chosen, ref_rejected, kind)
        loss = losses.mean()
        grads = torch.autograd.grad(loss, [chosen, rejected])
        cases.append(dict(
            loss_type=kind, beta=beta, label_smoothing=smoothing, reference_free=reference_free, chosen=short(chosen), rejected=short(rejected),
            ref_chosen=short(ref_chosen), ref_rejected=short(ref_rejected), loss=digits(loss), grad_chosen=digits(grads[0]),
            grad_rejected=digits(grads[1]), chosen_reward=digits(chosen_rewards.mean()), rejected_reward=digits(rejected_rewards.mean())))
    return cases


def reward_section():
    from trl.trainer.reward_trainer import RewardTrainer

    cases = []
    for i, (margin, center) in enumerate([(False, None), (True, None), (False, 0.01), (True, 0.5)]):
        g = torch.Generator().manual_seed(40 + i)
        chosen, rejected = (rounded(normal(g, 6, scale=3)).requires_grad_() for _ in range(2))
        margins = rounded(torch.rand(6, generator=g))
        inputs = dict(input_ids_chosen=0, attention_mask_chosen=0, input_ids_rejected=1, attention_mask_rejected=0)
        if margin:
            inputs["margin"] = margins
        trainer = stub(args=types.SimpleNamespace(center_rewards_coefficient=center))
        loss = RewardTrainer.compute_loss(trainer, lambda input_ids, **_: dict(logits=[chosen, rejected][input_ids]), inputs)
        grads = torch.autograd.grad(loss, [chosen, rejected])
        cases.append(dict(chosen=short(chosen), rejected=short(rejected), margins=short(margins) if margin else [], center_coef=center or 0.0,
                          loss=digits(loss), grad_chosen=digits(grads[0]), grad_rejected=digits(grads[1])))
    return cases


def ppo_section():
    from trl.trainer.ppo_trainer import PPOTrainer

    cases = []
    lengths = [6, 1, 4, 5]
    mask = torch.tensor([[int(t < length) for t in range(TIME)] for length in lengths])
    settings = [(0.2, 0.2, 0.1, 1.0, 0.95, 0.2), (0.1, 0.05, 0.5, 0.9, 0.8, 0.05), (0.2, 5.0, 1.0, 1.0, 1.0, 0.0)]
    for i, (clip, clip_value, vf_coef, gamma, lam, kl_coef) in enumerate(settings):
        g = torch.Generator().manual_seed(60 + i)
        n = len(lengths)
        old = rounded(-torch.rand(n, TIME, generator=g) * 3 - 0.05)
        logp = rounded(old + normal(g, n, TIME, scale=0.3)).requires_grad_()
        ref, values = rounded(old + normal(g, n, TIME, scale=0.5)), rounded(normal(g, n, TIME))
        vpred = rounded(values + normal(g, n, TIME, scale=0.2)).requires_grad_()
        scores = rounded(normal(g, n))
        config = types.SimpleNamespace(cliprange=clip, cliprange_value=clip_value, vf_coef=vf_coef, gamma=gamma, lam=lam, whiten_rewards=False,
                                       kl_penalty="kl", ratio_threshold=1e9)
        trainer = stub(config=config, kl_ctl=types.SimpleNamespace(value=kl_coef))
        trainer._kl_penalty = types.MethodType(PPOTrainer._kl_penalty, trainer)
        rewards, _, _ = PPOTrainer.compute_rewards(trainer, scores, old, ref, mask)
        masked_values, advantages, returns = PPOTrainer.compute_advantages(trainer, values, rewards, mask)
        policy_loss, value_loss, stats = PPOTrainer.loss(trainer, old, masked_values, torch.zeros(n, TIME, 3).double(), vpred, logp, mask,
                                                         advantages, returns)
        grads = torch.autograd.grad(policy_loss + value_loss, [logp, vpred])
        cases.append(dict(
            clip=clip, value_clip=clip_value, value_coef=vf_coef, gamma=gamma, **{"lambda": lam}, kl_coef=kl_coef, lengths=lengths,
            old_logp=short(old), logp=short(logp), ref_logp=short(ref), old_value=short(values), value=short(vpred), score=short(scores),
            reward=digits(rewards), advantage=digits(advantages), **{"return": digits(returns)}, policy_loss=digits(policy_loss),
            value_loss=digits(value_loss), grad_logp=digits(grads[0]), grad_value=digits(grads[1]),
            clip_fraction=float(stats["policy/clipfrac"]), value_clip_fraction=float(stats["val/clipfrac"])))
    return cases


def kl_controller_section():
    from trl.trainer.utils import AdaptiveKLController

    g = torch.Generator().manual_seed(80)
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    steps = []
    for _ in range(12):
        measured, rollouts = round(float(torch.rand((), generator=g)) * 12, 3), int(torch.randint(1, 512, (), generator=g))
        controller.update(measured, rollouts)
        steps.append(dict(measured=measured, rollouts=rollouts, coef=float(controller.value)))
    return dict(start=0.2, target=6.0, horizon=10000, steps=steps)


def main():
    torch.set_num_threads(1)
    import trl

    if sys.argv[1] == "--old":
        assert trl.__version__ == "0.11.4", trl.__version__
        print(json.dumps(dict(ppo=ppo_section(), kl_controller=kl_controller_section())))
        return
    path = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(__file__).parent / "trl_losses.json"
    old = subprocess.run([sys.executable, __file__, "--old"], env=os.environ | dict(PYTHONPATH=sys.argv[1]), check=True, capture_output=True)
    data = dict(versions=dict(trl=trl.__version__, trl_ppo="0.11.4", torch=torch.__version__), lengths=LENGTHS, max_length=MAX_LENGTH,
                grpo=grpo_section(), rloo=rloo_section(), dpo=dpo_section(), reward_model=reward_section())
    data |= json.loads(old.stdout.splitlines()[-1])
    path.write_text(json.dumps(data, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")
    for batch in data["grpo"]:
        print([(c["loss_type"], c["level"], c["loss"], round(c["clip_low_fraction"], 2), round(c["clip_high_fraction"], 2)) for c in batch["cases"]])
    print([(c["loss"]) for c in data["rloo"] + data["dpo"] + data["reward_model"]])
    print([(c["policy_loss"], c["value_loss"], c["clip_fraction"], c["value_clip_fraction"]) for c in data["ppo"]])
    print(path.name, path.stat().st_size, "bytes", data["versions"])


if __name__ == "__main__":
    main()
