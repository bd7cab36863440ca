"""The plain trainer's step of PPO, GRPO and RLOO: a rollout and one minibatch, with one fault planted.

Rectangles [B, R] as most trainers have them; it shares no code with the judge's references.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.plain_losses import DrawnTokens, policy_loss
from threestep.plugins.audit.recording.files import StepRecord
from threestep.plugins.audit.tests.plain_trainer import PlainTrainer, Row, Setting

SAMPLES, PROMPTS = 4, 3  # of each rank
LONGEST = 8


class PlainPolicyTrainer(PlainTrainer):
    """estimator: gae, grpo or rloo."""

    def __init__(self, setting: Setting, estimator: str) -> None:
        super().__init__(setting)
        self.estimator = estimator
        self.kl_in = setting.options.get("kl_in", "reward" if estimator == "gae" else "loss")
        self.kl_coef = 0.2
        self.settings = {
            "reduction": setting.options.get("reduction", "token mean"), "longest_tokens": LONGEST,
            "advantage": estimator, "gamma": 0.97, "policy_loss": setting.options.get("policy_loss", "ppo"),
            "lam": 0.9, "norm_by": "group" if estimator in ("grpo", "grpo_passk") else "none", "std_ddof": 1.0,
            "std_epsilon": 1e-4, "whiten": estimator in ("gae", "reinforce++"),
            "kl_estimator": "k1" if self.kl_in == "reward" else "k3",
            "kl_in": self.kl_in, "kl_coef": self.kl_coef, "clip_low": 0.2, "clip_high": 0.28, "clip_value": 0.3,
        }  # fmt: skip

    def policy(self) -> StepRecord:
        ranks = range(self.setting.ranks)
        rollouts = [self.rollout(rank) for rank in ranks]
        raw = [self.raw_advantages(one) for one in rollouts]
        advantages = self.whitened(raw, rollouts) if self.settings["whiten"] else raw
        for rank in ranks:
            self.note_rollout(rank, rollouts[rank], raw[rank], advantages[rank])
        self.learn(rollouts, raw, advantages)
        return self.record("policy")

    def rollout(self, rank: int) -> dict[str, Any]:
        """The responses of a rank, [B, R] each."""
        batch = SAMPLES * PROMPTS
        lengths = torch.randint(2, LONGEST + 1, (batch,), generator=self.random)
        inside = torch.arange(LONGEST) < lengths.unsqueeze(1)
        ended = self.floats(batch) > -0.3
        counts = torch.ones(batch, dtype=torch.bool)
        if self.setting.options.get("leaves_out"):
            counts = ended.clone()
            counts[0] = True
        zeros = torch.zeros(batch, LONGEST)

        def values(mean: float, scale: float) -> torch.Tensor:
            return torch.where(inside, mean + scale * self.floats(batch * LONGEST).view(batch, LONGEST), zeros)

        found: dict[str, Any] = {"lengths": lengths, "inside": inside, "ended": ended, "counts": counts}
        found["old"] = values(-2.0, 0.7)
        found["ref"] = torch.where(inside, found["old"] + values(0.0, 0.4), zeros)
        found["sampling"] = torch.where(inside, found["old"] + values(0.0, 0.05), zeros)
        found["values"] = values(0.2, 0.5)
        found["scores"], found["greedy"] = self.floats(batch), self.floats(PROMPTS).repeat_interleave(SAMPLES)
        found["numbers"] = (torch.arange(batch) // SAMPLES * self.setting.ranks + rank) * SAMPLES + torch.arange(
            batch
        ) % SAMPLES
        found["groups"] = found["numbers"] // SAMPLES
        found["rewards"] = self.rewards(found)
        return found

    def kl(self, logprobs: torch.Tensor, ref: torch.Tensor, name: str) -> torch.Tensor:
        d = logprobs - ref
        return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[name]

    def rewards(self, roll: dict[str, Any]) -> torch.Tensor:
        name, old, fault = self.settings["kl_estimator"], roll["old"], self.fault
        if fault == "k3 in the reward":
            name = "k3"
        if fault == "KL of sampling logprobs":
            old = roll["sampling"]
        kl = self.kl_coef * self.kl(old, roll["ref"], name)
        if self.kl_in == "loss":
            kl = torch.zeros_like(kl)
        if fault == "KL maximised":
            kl = -kl
        ends = roll["lengths"] - 1
        rewards = torch.where(roll["inside"], -kl, 0.0)
        rewards[torch.arange(len(ends)), ends] += roll["scores"]
        return rewards

    def raw_advantages(self, roll: dict[str, Any]) -> torch.Tensor:
        if self.estimator == "gae":
            return self.gae(roll)
        if self.estimator in ("reinforce++", "remax"):
            return self.to_go(roll)
        outcomes, fault = roll["rewards"].sum(1), self.fault
        if self.estimator in ("opo", "grpo_passk"):
            return torch.where(roll["inside"], self.others(roll, outcomes).reshape(-1, 1), 0.0)
        grouped = outcomes.view(PROMPTS, SAMPLES)
        mean = grouped.mean(1, keepdim=True)
        if fault == "baseline of the rank":
            mean = outcomes.mean()
        std = grouped.std(1, keepdim=True)
        if fault == "std of the rank":
            std = outcomes.std()
        centred = grouped - mean
        if self.estimator == "rloo" and fault != "mean of all":
            centred = centred * SAMPLES / (SAMPLES - 1)
        elif self.estimator == "grpo" and fault != "no std":
            centred = centred / (std + (1e-8 if fault == "another epsilon" else 1e-4))
        return torch.where(roll["inside"], centred.reshape(-1, 1), 0.0)

    def to_go(self, roll: dict[str, Any]) -> torch.Tensor:
        """REINFORCE++ and ReMax."""
        gamma = self.settings["gamma"] if self.estimator == "reinforce++" and self.fault != "no discount" else 1.0
        found, running = torch.zeros_like(roll["rewards"]), torch.zeros(len(roll["rewards"]))
        for t in reversed(range(LONGEST)):
            running = roll["rewards"][:, t] + gamma * running
            found[:, t] = running
        if self.fault == "outcomes for rewards to go":
            found = roll["rewards"].sum(1, keepdim=True).expand_as(found)
        if self.estimator == "remax" and self.fault != "no greedy score":
            found = found - roll["greedy"].unsqueeze(1)
        return torch.where(roll["inside"], found, 0.0)

    def others(self, roll: dict[str, Any], outcomes: torch.Tensor) -> torch.Tensor:
        """OPO, the best of k and GPG, [PROMPTS, SAMPLES]."""
        grouped, lengths = outcomes.view(PROMPTS, SAMPLES), roll["lengths"].view(PROMPTS, SAMPLES)
        if self.estimator == "opo":
            weights = torch.ones_like(grouped) if self.fault == "lengths left out" else lengths
            return grouped - (weights * grouped).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        best = grouped.topk(2, dim=1)
        lead = (best.values[:, 0] - best.values[:, 1]).unsqueeze(1)
        found = torch.zeros_like(grouped).scatter(1, best.indices[:, :1], lead)
        return found if self.fault == "no std" else found / (grouped.std(1, keepdim=True) + 1e-4)

    def gae(self, roll: dict[str, Any]) -> torch.Tensor:
        gamma, lam = self.settings["gamma"], self.settings["lam"]
        if self.fault == "gamma left out":
            gamma = 1.0
        found = torch.zeros_like(roll["values"])
        for b, length in enumerate(roll["lengths"].tolist()):
            after, running = 0.0, 0.0
            if self.fault == "bootstrap everywhere":
                after = float(roll["values"][b, length - 1])
            for t in reversed(range(length)):
                value = float(roll["values"][b, t])
                running = float(roll["rewards"][b, t]) + gamma * after - value + gamma * lam * running
                after, found[b, t] = value, running
        return found

    def whitened(self, raw: list[torch.Tensor], rollouts: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Over the tokens that count, of all ranks."""
        masks = [roll["inside"] & roll["counts"].unsqueeze(1) for roll in rollouts]
        fault = self.fault
        if fault == "not whitened":
            return [torch.where(mask, one, 0.0) for one, mask in zip(raw, masks, strict=True)]
        used = torch.cat([one[mask] for one, mask in zip(raw, masks, strict=True)])
        found = []
        for one, mask in zip(raw, masks, strict=True):
            own = one[mask] if fault == "whitened by rank" else used
            mean = 0.0 if fault == "whitened without shift" else own.mean()
            std = torch.sqrt(own.var(unbiased=fault != "whitened ddof 0") + 1e-8)
            found.append(torch.where(mask, (one - mean) / std, 0.0))
        return found

    def note_rollout(self, rank: int, roll: dict[str, Any], raw: torch.Tensor, advantages: torch.Tensor) -> None:
        inside = roll["inside"]
        base = advantages if self.fault == "returns of whitened" else raw
        if self.estimator == "gae":
            roll["returns"] = torch.where(inside, base + roll["values"], 0.0)
            self.put(rank, rollout_values=roll["values"][inside], rollout_returns=roll["returns"][inside])
        self.put(
            rank,
            rollout_numbers=roll["numbers"],
            rollout_groups=roll["groups"],
            rollout_lengths=roll["lengths"],
            rollout_counts=roll["counts"],
            rollout_ended=roll["ended"],
            rollout_scores=roll["scores"],
            rollout_sampling_logprobs=roll["sampling"][inside],
            rollout_old_logprobs=roll["old"][inside],
            rollout_ref_logprobs=roll["ref"][inside],
            rollout_rewards=roll["rewards"][inside],
            rollout_advantages=advantages[inside],
            rollout_greedy_scores=roll["greedy"],
        )

    def learn(self, rollouts: list[dict[str, Any]], raw: list[torch.Tensor], advantages: list[torch.Tensor]) -> None:
        """One minibatch of two thirds of each rank's responses."""
        losses: dict[str, list[list[torch.Tensor]]] = {"policy": [], "kl": [], "value": []}
        masks: list[list[torch.Tensor]] = []
        for rank, roll in enumerate(rollouts):
            picked = torch.randperm(len(roll["lengths"]), generator=self.random)[:8]
            for each in losses.values():
                each.append([])
            masks.append([])
            for micro, part in enumerate((picked[:3], picked[3:7], picked[7:])):
                found, mask = self.micro_batch(rank, micro, part, (roll, advantages[rank]))
                masks[rank].append(mask)
                for name, loss in found.items():
                    losses[name][rank].append(loss)
        per = "sequence" if self.settings["reduction"] == "sequence mean" else "token"
        self.figures["policy_loss"] = float(self.reduced(losses["policy"], masks, per))
        counted = [mask for own in masks for mask in own]
        tokens, rows = sum(int(mask.sum()) for mask in counted), sum(int(mask.any(1).sum()) for mask in counted)
        self.figures["denominator"] = float(rows if per == "sequence" else tokens)
        total = self.figures["policy_loss"]
        if self.kl_in == "loss":
            self.figures["kl_loss"] = float(self.reduced(losses["kl"], masks, per))
            total += self.kl_coef * self.figures["kl_loss"] * (0 if self.fault == "KL left out of the loss" else 1)
        self.figures["loss"] = total
        if self.estimator == "gae":
            self.figures["value_loss"] = float(self.reduced(losses["value"], masks))

    def micro_batch(
        self, rank: int, micro: int, part: torch.Tensor, given: tuple[dict[str, Any], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Losses [N, T] and the loss mask of some responses, each after a prompt of three tokens."""
        roll, advantages = given
        lengths = roll["lengths"][part].tolist()
        rows = [
            Row(torch.cat([self.ids(3), self.ids(length)]), torch.arange(3 + length) >= 3, int(roll["numbers"][at]))
            for at, length in zip(part.tolist(), lengths, strict=True)
        ]
        batch = _, data, real = self.batch(rows)
        self.note(rank, micro, rows, batch)
        width = data.shape[1]

        def laid_out(values: torch.Tensor, own: torch.Tensor = part) -> torch.Tensor:
            found = torch.zeros(len(own), width)
            found[:, 3:] = values[own][:, : width - 3]
            return torch.where(data, found, 0.0)

        old, ref, sampling = (laid_out(roll[name]) for name in ("old", "ref", "sampling"))
        own = laid_out(advantages)
        if self.fault == "advantages of the next response":
            own = laid_out(advantages, (part + 1) % len(advantages))
        elif self.fault == "old logprobs one token late":
            old = torch.where(data, torch.nn.functional.pad(old, (1, 0))[:, :-1], 0.0)
        elif self.fault == "sampling logprobs for old":
            old = sampling
        new = torch.where(data, laid_out(roll["old"]) + 0.3 * self.floats(data.numel()).view_as(old), 0.0)
        mask = data & roll["counts"][part].unsqueeze(1)
        self.put(
            rank, numbers=roll["numbers"][part], logprobs=self.flat(new, real), old_logprobs=self.flat(old, real),
            ref_logprobs=self.flat(ref, real), advantages=self.flat(own, real), loss_mask=self.flat(mask, real),
        )  # fmt: skip
        self.selected = mask & (self.floats(mask.numel()).view_as(new) > 0.5)
        if self.settings["policy_loss"] == "clip_cov":
            self.put(rank, selected=self.flat(self.selected, real))
        found = {
            "policy": self.policy_loss(new, old, own, mask, others=(ref, sampling)),
            "kl": self.kl_loss(new, old, ref),
        }
        if self.estimator == "gae":
            values, returns = laid_out(roll["values"]), laid_out(roll["returns"])
            current = torch.where(data, values + 0.4 * self.floats(data.numel()).view_as(values), 0.0)
            self.put(
                rank,
                new_values=self.flat(current, real),
                old_values=self.flat(values, real),
                returns=self.flat(returns, real),
            )
            held = values + (current - values).clamp(-0.3, 0.3)
            worse = torch.maximum((current - returns) ** 2, (held - returns) ** 2)
            if self.fault == "value not clipped":
                worse = (current - returns) ** 2
            found["value"] = worse * (1.0 if self.fault == "value without half" else 0.5)
        return found, mask

    def policy_loss(
        self, new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor, *, others: Any
    ) -> torch.Tensor:
        fault, (low, high) = self.fault, (0.2, 0.28)
        log_ratio = new - old
        if fault == "ratio upside down":
            log_ratio = old - new
        elif fault == "ratio to the sampler":
            log_ratio = new - others[1]
        elif fault == "ratio to the reference":
            log_ratio = new - others[0]
        elif fault == "ratio of sequences":
            log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1)).unsqueeze(1) + torch.zeros_like(new)
        if fault == "clip bounds swapped":
            low, high = high, low
        ratio = torch.exp(log_ratio)
        name = self.settings["policy_loss"]
        if name != "ppo" and fault != "ppo in its place":
            return self.newer_loss(name, (new, old, advantage), mask, (low, high))
        free, held = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
        if fault == "not clipped ratio":
            return -free
        if fault == "loss sign":
            return torch.minimum(free, held)
        if fault == "advantage sign":
            return torch.maximum(free, held)
        return -torch.minimum(free, held)

    def newer_loss(
        self, name: str, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mask: torch.Tensor, bounds: Any
    ) -> torch.Tensor:
        """Row by row, as the papers have them."""
        taus = (1.05, 1.0) if self.fault == "taus swapped" else (1.0, 1.05)
        low, high = (1.0, 1e9) if self.fault == "weight not clipped" else bounds
        constants = {"clip_low": low, "clip_high": high, "sapo_tau_pos": taus[0], "sapo_tau_neg": taus[1]}
        selected = torch.zeros_like(mask) if self.fault == "selected tokens trained" else self.selected
        rows = zip(*given, mask, selected, strict=True)
        found = [policy_loss(name, DrawnTokens(*row, constants)) if row[3].any() else 0.0 * row[0] for row in rows]
        return torch.stack(found)

    def kl_loss(self, new: torch.Tensor, old: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
        name = self.settings["kl_estimator"]
        if self.fault == "k2 for k3":
            name = "k2"
        elif self.fault == "KL reversed":
            return self.kl(ref, new, name)
        elif self.fault == "KL of the old policy":
            return self.kl(old, ref, name)
        return self.kl(new, ref, name)


POLICY_OBJECTIVES = ("gae", "grpo", "rloo", "reinforce++", "remax", "opo", "grpo_passk")
POLICY_LOSSES = ("ppo", "gspo", "cispo", "geo_mean", "sapo", "gpg", "clip_cov")
# Options that a fault needs to show.
OPTIONS = {
    "empty rows counted": {"leaves_out": True, "reduction": "sequence mean"},
    "taus swapped": {"policy_loss": "sapo"},
    "weight not clipped": {"policy_loss": "cispo"},
    "ppo in its place": {"policy_loss": "gspo"},
    "selected tokens trained": {"policy_loss": "clip_cov"},
}
# As `plain_trainer.FAULTS`.
POLICY_FAULTS = (
    ("gae", "k3 in the reward", "rollout_rewards", "estimator is k3"),
    ("gae", "KL maximised", "rollout_rewards", "maximised"),
    ("gae", "KL of sampling logprobs", "rollout_rewards", "sampling"),
    ("gae", "bootstrap everywhere", "rollout_advantages", "after every response"),
    ("gae", "gamma left out", "rollout_advantages", "gamma is 1"),
    ("gae", "not whitened", "rollout_advantages", "not whitened"),
    ("gae", "whitened by rank", "rollout_advantages", "each rank alone"),
    ("gae", "whitened without shift", "rollout_advantages", "keep their mean"),
    ("gae", "whitened ddof 0", "rollout_advantages", "denominator n"),
    ("gae", "returns of whitened", "rollout_returns", "whitened advantages"),
    ("grpo", "std of the rank", "rollout_advantages", "deviation is over each rank's batch"),
    ("grpo", "no std", "rollout_advantages", "nothing is divided"),
    ("grpo", "another epsilon", "rollout_advantages", "epsilon is 1e-8"),
    ("grpo", "baseline of the rank", "rollout_advantages", "mean of each rank's batch"),
    ("rloo", "mean of all", "rollout_advantages", "whole group"),
    ("grpo", "advantages of the next response", "advantages", "numbers of the next"),
    ("grpo", "old logprobs one token late", "old_logprobs", "one token late"),
    ("grpo", "sampling logprobs for old", "old_logprobs", "sampling log-probabilities"),
    ("gae", "not clipped ratio", "policy_loss", "not clipped"),
    ("grpo", "clip bounds swapped", "policy_loss", "swapped"),
    ("grpo", "ratio upside down", "policy_loss", "upside down"),
    ("grpo", "ratio to the sampler", "policy_loss", "sampling"),
    ("grpo", "ratio to the reference", "policy_loss", "reference"),
    ("grpo", "ratio of sequences", "policy_loss", "whole sequences"),
    ("rloo", "advantage sign", "policy_loss", "sign of the advantages"),
    ("rloo", "loss sign", "policy_loss", "sign of the loss"),
    ("grpo", "empty rows counted", "policy_loss", "no token counts"),
    ("grpo", "mean of rows", "policy_loss", "mean over sequences"),
    ("grpo", "local denominators", "policy_loss", "local"),
    ("grpo", "k2 for k3", "kl_loss", "estimator is k2"),
    ("grpo", "KL reversed", "kl_loss", "reference to the policy"),
    ("grpo", "KL of the old policy", "kl_loss", "old policy"),
    ("grpo", "KL left out of the loss", "loss", "left out"),
    ("reinforce++", "no discount", "rollout_advantages", "gamma is 1"),
    ("reinforce++", "outcomes for rewards to go", "rollout_advantages", "sum of all rewards"),
    ("reinforce++", "whitened by rank", "rollout_advantages", "each rank alone"),
    ("remax", "no greedy score", "rollout_advantages", "greedy response is left out"),
    ("opo", "lengths left out", "rollout_advantages", "mean of the whole group"),
    ("grpo_passk", "no std", "rollout_advantages", "nothing is divided"),
    ("grpo", "taus swapped", "policy_loss", "temperatures are swapped"),
    ("grpo", "weight not clipped", "policy_loss", "not clipped"),
    ("grpo", "ppo in its place", "policy_loss", "the loss is ppo"),
    ("grpo", "selected tokens trained", "policy_loss", "no token is selected"),
    ("gae", "value not clipped", "value_loss", "not clipped"),
    ("gae", "value without half", "value_loss", "1/2"),
)
