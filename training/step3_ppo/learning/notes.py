"""The optimizer steps of one rollout as others see them: records, digests, bad steps, outcomes of prompts, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.step3_ppo.learning.outcomes import PromptOutcome, prompt_outcomes
from training.step3_ppo.learning.record import MinibatchOfRollout, minibatch_numbers, policy_record
from training.step3_ppo.measures.measures import Measure, Moments, figures_of, moments, spread
from training.utils.engine.ranks.collectives import gathered
from training.utils.layout.rank_share import documents_of
from training.utils.run.ahead import Ahead

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Experience, Forward, LearntValues
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.step3_ppo.experience.sequences import TrainingSequence
    from training.utils.contracts.documents import TokenSequence
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.rows import PromptRow
    from training.utils.engine.bad_steps import BadSteps
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.recording.recorder import StepRecording


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

    def laid_out(
        self,
        forwards_of: Callable[[Sequence[TrainingSequence]], Sequence[Forward]],
        minibatches: Sequence[list[int]],
        device: torch.device,
    ) -> Iterable[Callable[[], Sequence[Forward]]]:
        """Return for each minibatch what returns its forwards: those that reading made, for --reuse_forwards, or new
        ones, which a thread lays out beside a GPU's work. minibatches: places of their sequences."""
        reusable = [forward for each in self.experiences for forward in each.reused.forwards]  # of one minibatch
        if reusable:
            return [lambda: reusable] * len(minibatches)
        ahead: Ahead[list[int], Sequence[Forward]] = Ahead(
            lambda places: forwards_of([self.sequences[place] for place in places]), device.type == "cuda"
        )
        return ahead.each(minibatches)


class Minibatch(NamedTuple):
    """seed: of its epoch. places: among the sequences of all ranks. forwards: returns this rank's."""

    seed: int
    places: Sequence[int]
    sequences: Sequence[TrainingSequence]
    forwards: Callable[[], Sequence[Forward]]


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

    def begun(self, guests: Guests, texts: Sequence[TokenSequence], train_actor: bool) -> StepRecording:
        """Return the recording of the next step, which the critic may have begun. guests: of the actor."""
        learnt, number = self.rollout.learnt, len(self._steps) + FIRST
        if learnt is None:
            recording = self.settings.records.of_step(self.rollout.iteration, self.ranks, number)
        else:
            recording = learnt.recording
        if train_actor:
            added = texts and self.settings.updates.learning.unsup_coef
            recording.note(other_terms=bool(guests) or bool(added))
        return recording

    def taken(
        self, recording: StepRecording, minibatch: Minibatch, forwards: Sequence[Forward], figures: dict[str, float]
    ) -> None:
        """Note a step. forwards: this rank's. A collective; ThreestepError where too many steps went wrong."""
        iteration, experiences, own, _, rows = self.rollout
        experience, learning = self.settings.experience, self.settings.updates.learning
        self._computed += sum(forward.rows.input_ids_NT.numel() for forward in forwards)
        recorded = MinibatchOfRollout(iteration, experiences, own, minibatch.sequences, forwards, minibatch.seed)
        make_record = partial(policy_record, recorded, experience, learning, kl_coef=self.kl_coef, figures=figures)
        recording.write(make_record, minibatch_numbers(recorded, rows, figures, is_first=not self._steps))
        self.bad_steps.check(iteration, figures, [self._row_ids[place] for place in minibatch.places] if rows else [])
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
