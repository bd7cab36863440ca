"""The outcome of each prompt of a step: learned from, or left out, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from training.step3_ppo.experience.sequences import TrainingSequence

NO_RESPONSE_COUNTS = "none of its responses counts (--mask_truncated_responses)"
NO_STEP_TAKEN = "no optimizer step was taken with it (--stop_update_kl, or a step that was skipped)"


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
