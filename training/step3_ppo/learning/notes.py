"""Notes on the optimizer steps of one rollout for observers, bad steps and figures, and the outcome of each prompt:
learned from, or left out, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from training.step3_ppo.contracts.measures import Measure, Moments, figures_of, moments, spread
from training.utils.contracts.run import StepTaken
from training.utils.engine.ranks.collectives import gathered
from training.utils.layout.trie import documents_of

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Experience, Forward, LearntValues
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.step3_ppo.experience.sequences import TrainingSequence
    from training.utils.contracts.rows import PromptRow
    from training.utils.contracts.run import ObservedStep
    from training.utils.engine.accumulate import MicroBatch
    from training.utils.engine.bad_steps import BadSteps
    from training.utils.engine.ranks.startup import Ranks

NO_RESPONSE_COUNTS = "none of its responses count (--mask_truncated_responses)"
NO_STEP_TAKEN = "no optimizer step used it (--stop_update_kl, or a skipped step)"


class PromptOutcome(NamedTuple):
    """left_out: the reason; None where the prompt was learned from."""

    row_id: int
    left_out: str | None


def prompt_outcomes(
    row_ids: Sequence[int], sequences: Sequence[TrainingSequence], stepped: Collection[int], samples_per_prompt: int
) -> list[PromptOutcome]:
    """Return the outcome of each prompt of all ranks, in the order of their positions.

    row_ids: of each of the `sequences`, the samples of a prompt adjacent. stepped: places of the sequences with which
    an optimizer step was taken.
    """
    found = []
    for first in range(0, len(sequences), samples_per_prompt):
        own = range(first, first + samples_per_prompt)
        counted = [place for place in own if sequences[place].counts]
        reason = NO_STEP_TAKEN if counted else NO_RESPONSE_COUNTS
        found.append(PromptOutcome(row_ids[first], None if any(each in stepped for each in counted) else reason))
    return found


FIRST = 1  # the number of a rollout's first optimizer step


class LearntRollout(NamedTuple):
    """A rollout as it is learned from. experiences, own, rows: of this rank, their sequences, and its prompts.
    sequences: of all ranks."""

    iteration: int
    experiences: Sequence[Experience]
    own: Sequence[TrainingSequence]
    sequences: Sequence[TrainingSequence]
    rows: Sequence[PromptRow]

    @property
    def learnt(self) -> LearntValues | None:
        """By the critic, of the one minibatch."""
        return next((each.reused.values for each in self.experiences if each.reused.values is not None), None)


class Minibatch(NamedTuple):
    """seed: of its epoch. places: among the sequences of all ranks. forwards: returns this rank's."""

    seed: int
    places: Sequence[int]
    sequences: Sequence[TrainingSequence]
    forwards: Callable[[], Sequence[Forward]]


@dataclass(frozen=True)
class PolicyStep(StepTaken):
    """forwards: this rank's of the minibatch. beside: what the actor learned from with it. kl_coef: of the rollout,
    whose first step is update 1."""

    kind: ClassVar[str] = "policy"

    rollout: LearntRollout
    minibatch: Minibatch
    forwards: Sequence[Forward]
    beside: Sequence[MicroBatch]
    settings: PpoSettings
    kl_coef: float


@dataclass(eq=False)
class StepNotes:
    """Notes on the optimizer steps of a rollout. empty: minibatches without a step."""

    settings: PpoSettings
    ranks: Ranks
    rollout: LearntRollout
    kl_coef: float
    bad_steps: BadSteps
    empty: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._row_ids = row_ids_of_all_ranks(self.rollout.rows, self.settings.experience.samples_per_prompt)
        self._steps: list[Mapping[str, float]] = []
        self._stepped: set[int] = set()
        self._computed = 0

    def begun(self) -> ObservedStep:
        """Return the next step for its observers, which the critic may have begun."""
        learnt = self.rollout.learnt
        if learnt is not None:
            return learnt.observed
        return self.settings.step_observers.begin(self.rollout.iteration, self._next)

    @property
    def _next(self) -> int:
        """The number of the rollout's next optimizer step."""
        return len(self._steps) + FIRST

    def taken(
        self,
        observed: ObservedStep,
        minibatch: Minibatch,
        forwards: Sequence[Forward],
        beside: Sequence[MicroBatch],
        *,
        figures: dict[str, float],
    ) -> None:
        """Note a step. The rest: as of PolicyStep. A collective; ThreestepError where too many steps went wrong."""
        rollout, settings, number = self.rollout, self.settings, self.rollout.iteration
        self._computed += sum(forward.rows.input_ids_NT.numel() for forward in forwards)
        row_ids = [self._row_ids[place] for place in minibatch.places] if rollout.rows else []
        own = (rollout, minibatch, forwards, beside, settings, self.kl_coef)
        observed.taken(PolicyStep(number, figures, lambda: row_ids, *own, update=self._next))
        self.bad_steps.check(number, figures, row_ids)
        self._stepped.update(minibatch.places if not figures.get("actor/skipped", 0.0) else ())
        self._steps.append(figures)

    def outcomes(self) -> Sequence[PromptOutcome]:
        """Return those of the prompts of all ranks; () if these were not named."""
        if not self.rollout.rows:
            return ()
        each = self.settings.experience.samples_per_prompt
        return prompt_outcomes(self._row_ids, self.rollout.sequences, self._stepped, each)

    def figures(self, train_actor: bool) -> dict[str, float]:
        """Return means over the steps, and their tokens and FLOPs. A collective."""
        settings, steps = self.settings, self._steps
        means = {}
        for name in dict.fromkeys(name for figures in steps for name in figures):
            values = [figures[name] for figures in steps if name in figures]
            means[name] = sum(values) / len(values)
        means |= {"train/minibatches": float(len(steps)), "train/empty_minibatches": float(self.empty)}
        if settings.updates.meters:
            tokens = [sequence.tokens for sequence in self.rollout.sequences]
            documents = documents_of(tokens, settings.experience.layout.dealt)
            targets = sum(int(part.is_target.sum()) for part in tokens)
            epochs = len(steps) * settings.updates.sequences_per_minibatch * self.ranks.world_size / len(tokens)
            trained = settings.updates.meters if train_actor else settings.updates.meters[1:]
            means["learn/flops"] = epochs * sum(meter.flops(documents, targets) for meter in trained)
        return means | (rank_token_figures(self._computed) if steps else {})


def rank_token_figures(computed: int) -> dict[str, float]:
    """Return the mean, deviation and extremes over ranks of the tokens that each computed in a rollout's updates,
    padding included and a shared prompt once. A collective."""
    measure = Measure(torch.tensor([float(computed)]), spread("train/rank_tokens"))
    [own] = moments([measure])
    return figures_of([measure], [reduce(Moments.joined, gathered(own))])


def row_ids_of_all_ranks(rows: Sequence[PromptRow], samples_per_prompt: int) -> list[int]:
    """Return the row of each of all ranks' sequences, in the order of their numbers. A collective."""
    parts = gathered([row.row_id for row in rows])
    return [row_id for prompts in zip(*parts, strict=True) for row_id in prompts for _ in range(samples_per_prompt)]
