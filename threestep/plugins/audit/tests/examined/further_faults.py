"""Twelve more faults of the plain trainer, which were written after the judge had learned from the sixty."""

from __future__ import annotations

from typing import Any

import torch

from threestep.plugins.audit.tests.examined.fault import PlainFault
from threestep.plugins.audit.tests.examined.plain import Batch, PlainTrainer, Text
from threestep.plugins.audit.tests.examined.plain_policy import PolicyTrainer


def _stale(self: Any, gradients: list[torch.Tensor]) -> torch.Tensor:
    """zero_grad() is forgotten between the micro-batches of a rank and the next rank's."""
    return torch.stack(gradients).mean(0) + 0.5 * gradients[0]


def _ipo(self: Any, margin_Q: torch.Tensor) -> torch.Tensor:
    beta = self.settings["beta"]
    return (margin_Q / beta - 1 / (2 * beta)).square()


def _swapped(self: Any, *logprobs_Q: torch.Tensor) -> torch.Tensor:
    chosen_Q, rejected_Q, ref_chosen_Q, ref_rejected_Q = logprobs_Q
    return PlainTrainer.dpo_losses(self, rejected_Q, chosen_Q, ref_rejected_Q, ref_chosen_Q)


def _of_responses(self: Any, losses_Q: torch.Tensor) -> torch.Tensor:
    self.keep(pair_losses=losses_Q)
    return losses_Q.sum() / (2 * self.pairs)


def _by_length(self: Any) -> Any:
    advantages, returns = PolicyTrainer.estimated(self)
    return {number: own_R / len(own_R) for number, own_R in advantages.items()}, returns


def _of_old_policy(self: Any, batch: Batch) -> torch.Tensor:
    right = self.kl
    self.kl = lambda logprobs, ref: right(batch.spread(self.old), ref)
    loss = PolicyTrainer.part(self, batch)
    del self.kl
    return loss


def _of_sequences(self: Any, logprobs_T: torch.Tensor, old_T: torch.Tensor) -> torch.Tensor:
    """One ratio, of everything that the micro-batch holds."""
    counted = (old_T != 0).sum()
    return torch.exp((logprobs_T - old_T).sum() / counted).expand_as(old_T)


def _without_half(self: Any, new_T: torch.Tensor, old_T: torch.Tensor, returns_T: torch.Tensor) -> torch.Tensor:
    return 2.0 * PolicyTrainer.value_losses(self, new_T, old_T, returns_T)


def _undiscounted(self: Any, text: Text) -> torch.Tensor:
    """gamma is in the recursion, and not in delta."""
    gamma, lam = self.settings["gamma"], self.settings["lam"]
    values_R, rewards_R = self.values[text.number], self.rewards[text.number]
    deltas_R = rewards_R + torch.cat([values_R[1:], torch.zeros(1)]) - values_R
    found_R, last = torch.zeros_like(deltas_R), torch.zeros(())
    for t in reversed(range(text.drawn)):
        last = deltas_R[t] + gamma * lam * last
        found_R[t] = last
    return found_R


def _white_by_rank(self: Any, advantages: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for texts in self.responses:
        found |= PolicyTrainer.whitened(self, {text.number: advantages[text.number] for text in texts})
    return found


def _fault(name: str, words: str, quantity: str, cause: str, names: str, **replaced: Any) -> PlainFault:
    return PlainFault(name, words, (quantity,), cause, names, {"objective": name.split()[0]}, replaced)


FURTHER_FAULTS = [
    _fault(
        "sft stale gradients", "zero_grad() is forgotten, so that a share counts again", "gradients",
        "gradients of before are still there", "stale|zero_grad|left over|of the step before|counts? again|accumulat",
        over_ranks=_stale,
    ),
    _fault(
        "sft clip by value", "clip_grad_value_ in place of clip_grad_norm_", "clipped_gradients",
        "each number is clipped, not the norm", "each number is clipped",
        clipped=lambda self, gradients, norm: {
            name: each.clamp(-self.settings["max_grad_norm"] / 10, self.settings["max_grad_norm"] / 10)
            for name, each in gradients.items()
        },
    ),
    _fault(
        "sft rate early", "scheduler.step() stands before optimizer.step()", "learning_rate",
        "the learning rate is one step early", "one step early",
        rate=lambda self, number: PlainTrainer.rate(self, number + 1),
    ),
    _fault(
        "dpo ipo", "loss_type ipo in place of sigmoid", "pair_losses", "the loss is IPO's", "IPO", logistic=_ipo,
    ),
    _fault(
        "dpo swapped", "the collator puts the rejected first", "pair_losses", "chosen and rejected are swapped",
        "chosen and rejected are swapped", dpo_losses=_swapped,
    ),
    _fault(
        "reward of responses", "the batch size is of responses, two to a pair", "loss",
        "divided by responses, not by pairs", "responses|twice|half", pair_mean=_of_responses,
    ),
    _fault(
        "grpo by length", "an outcome's advantage is shared out over its tokens", "rollout_advantages",
        "advantages are divided by the length of the response", "divided by its tokens|length", estimated=_by_length,
    ),
    _fault(
        "grpo KL of the old policy", "the KL of the loss reads the old log-probabilities", "kl_loss",
        "the KL is the old policy's and has no gradient", "old policy", part=_of_old_policy,
    ),
    _fault(
        "grpo one ratio", "the mean log-ratio of the micro-batch in place of each token's", "policy_loss",
        "the ratio is not of tokens", "ratio is of|ratio.*(sequence|micro-batch)", ratio=_of_sequences,
    ),
    _fault(
        "ppo without the half", "(v - R)^2 in place of half of it", "value_loss", "the factor 1/2 is left out",
        "half|1/2|twice", value_losses=_without_half,
    ),
    _fault(
        "ppo delta without gamma", "r + V' - V", "rollout_advantages", "gamma is left out of delta",
        "gamma.*(delta|left out|next value)", gae=_undiscounted,
    ),
    _fault(
        "ppo whitened by rank", "moments of each rank alone", "rollout_advantages", "whitened over each rank alone",
        "each rank alone", whitened=_white_by_rank,
    ),
]  # fmt: skip
