"""The critic learns from the forwards that read its values, one micro-batch after the other (`--reuse_values`).

A sequence's returns need its own rewards and values alone, so that a micro-batch has its loss as soon as it is read
and no graph waits for the others'. Advantages are whitened over all of them, for which the actor's graphs have to wait.

B sequences of this rank, b of a micro-batch, R response tokens, r of one sequence, M of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from training.step3_ppo.advantages.inputs import AdvantageInputs
from training.step3_ppo.contracts.records import LearntValues
from training.step3_ppo.experience.sequences import of_all_ranks, read_balanced, targets_of
from training.step3_ppo.losses.losses import StepTotals, token_mean, value_loss
from training.utils.base.transfer import moved
from training.utils.contracts.run import NOT_OBSERVED
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee
from training.utils.engine.ranks.collectives import DeviceSums, gathered

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import ExperienceSettings
    from training.step3_ppo.experience.sequences import Share
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.run import ObservedStep
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine


def critic_loss(counted_M: torch.Tensor, weights_M: torch.Tensor, *errors: torch.Tensor) -> MicroLoss:
    """Return a micro-batch's part of the critic's loss. errors: of `value_loss`. weights_M: as of aggregations."""
    loss, clipped = (part.sum() for part in (errors[0] * weights_M, errors[1] * counted_M))
    return MicroLoss(loss, {"critic/value_loss": loss, "critic/clip_fraction": clipped})


class _ToLearn(NamedTuple):
    """A micro-batch: its rows, and of its sequences the rewards [r] and whether they count."""

    rows: TokenRows
    rewards: Sequence[torch.Tensor]
    counts: Sequence[bool]


@dataclass(frozen=True)
class ValueLearner:
    """Adds a rollout's gradient to the critic's, without a step. clip_range_value: as of `value_loss`. begin: begins
    to observe the step; called if anything counts."""

    critic: TrainingEngine
    settings: ExperienceSettings
    clip_range_value: float
    begin: Callable[[], ObservedStep]

    def __call__(self, rollout: Rollout, rewards_BR: torch.Tensor, counts_B: torch.Tensor) -> LearntValues:
        """Arguments as of Experience. A collective."""
        drawn, device, sums = rollout.drawn, rewards_BR.device, DeviceSums()
        rewards = of_all_ranks(rewards_BR[drawn.mask_BR].split(drawn.lengths_B.tolist()), device)
        counts = [counted for part in gathered(counts_B.tolist()) for counted in part]
        tokens = float(sum(len(rewards_r) for rewards_r, counted in zip(rewards, counts, strict=True) if counted))
        totals = StepTotals(tokens, float(sum(counts)), float(self.settings.scoring.length.max_tokens))
        observed = self.begin() if tokens else NOT_OBSERVED

        def read(share: Share) -> Iterator[dict[str, torch.Tensor]]:
            learnt = [
                _ToLearn(
                    moved(rows, device), [rewards[index] for index in indices], [counts[index] for index in indices]
                )
                for indices, rows in share
            ]
            values = [dict[str, torch.Tensor]() for _ in learnt]
            batches = [
                MicroBatch(each.rows, partial(self._loss, each, totals, found), learns=tokens > 0)
                for each, found in zip(learnt, values, strict=True)
            ]
            trainee = observed.watched(Trainee("critic", self.critic, batches))
            guests = trainee.begin()
            for micro_batch, found in zip(trainee.micro_batches, values, strict=True):
                sums.add(trainee.learn(micro_batch, guests))
                yield found

        values = read_balanced(rollout.sequences(), self.settings.layout, read, count=targets_of, device=device)[
            "values"
        ]
        values_BR = torch.zeros_like(rewards_BR).masked_scatter(drawn.mask_BR, values)
        return LearntValues(values_BR, sums.sums, observed)

    def _loss(self, batch: _ToLearn, totals: StepTotals, found: dict[str, torch.Tensor]) -> MicroLoss:
        """found: gets the values that were read."""
        values_M = self.critic(batch.rows, at="targets")
        found["values"] = values_M.detach().float()
        returns_M = self._returns(batch.rewards, found["values"])
        counted_M = torch.cat([returns_M[:0], *map(torch.full_like, batch.rewards, map(float, batch.counts))])
        errors = value_loss(values_M, found["values"], returns_M, self.clip_range_value)
        return critic_loss(counted_M, token_mean(counted_M, batch.rows.sequence_M, totals), *errors)

    def _returns(self, rewards: Sequence[torch.Tensor], values_M: torch.Tensor) -> torch.Tensor:
        """Return those of the tokens of a micro-batch."""
        if not rewards:
            return values_M
        lengths = [len(rewards_r) for rewards_r in rewards]
        rewards_bR, values_bR = (
            pad_sequence([*parts], batch_first=True) for parts in (rewards, values_M.split(lengths))
        )
        lengths_b = torch.tensor(lengths, device=values_M.device)
        inputs = AdvantageInputs(rewards_bR, lengths_b, torch.arange(len(lengths), device=values_M.device), values_bR)
        _, returns_bR = self.settings.estimator.estimate(inputs, self.settings.advantage)
        assert returns_bR is not None, "an estimator with a critic has returns"
        return returns_bR[inputs.inside_BR]
