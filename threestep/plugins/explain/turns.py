"""The speakers of a sequence: its prompt, the model, and those who answered between two turns of the model.

A record has no names of speakers. The model's tokens are those that the data want loss on; what stands between them
is of the environment of a rollout, or of others in the conversations of a dataset. S sequences, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from training.utils.contracts.rollout import ENVIRONMENT, MODEL

if TYPE_CHECKING:
    from threestep.plugins.audit.quantities.step import AuditedStep

ASKER, OTHERS = "prompt", "others"


class SpeakerTurns(NamedTuple):
    """speaker_T: words. turn_T: int, the model's turn, from 1, with the answer that follows it; 0 in the prompt."""

    speaker_T: np.ndarray
    turn_T: np.ndarray


def turns_of(step: AuditedStep) -> SpeakerTurns | None:
    """Return the turns of a step; None where the model speaks once in each sequence.

    Worked example, one sequence: data_mask [0 1 1 0 1] has the speakers prompt, model, model, environment, model and
    the turns [0 1 1 1 2].
    """
    if not step.has("data_mask"):
        return None
    model_T, sequence_T = step.tensor("data_mask") & step.real_T, step.sequence_T
    begins_T = np.diff(model_T.astype(np.int64), prepend=0) > 0
    begins_T |= model_T & (step.place_T == 0)
    count_S = np.bincount(sequence_T, begins_T, minlength=len(step.rank_S)).astype(np.int64)
    turn_T = np.cumsum(begins_T) - (np.cumsum(count_S) - count_S)[sequence_T]
    if turn_T.max(initial=0) < 2:
        return None
    speaker_T = np.full(len(turn_T), ENVIRONMENT if step.head.objective == "policy" else OTHERS, dtype=object)
    speaker_T[turn_T == 0] = ASKER
    speaker_T[model_T] = MODEL
    return SpeakerTurns(speaker_T, turn_T)


def parts_of(speaker_T: np.ndarray, share_T: np.ndarray) -> list[tuple[str, int, float]]:
    """Return (speaker, its tokens, their share) of each part of one sequence, in turns."""
    begins = np.flatnonzero(np.r_[True, speaker_T[1:] != speaker_T[:-1]])
    ends = np.r_[begins[1:], len(speaker_T)]
    return [
        (str(speaker_T[begin]), int(end - begin), float(share_T[begin:end].sum()))
        for begin, end in zip(begins, ends, strict=True)
    ]
