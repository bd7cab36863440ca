"""An optimizer step as it was watched, the content of its record and its digest, and tensors that every record has.

K micro-batches of a rank, S sequences, T tokens, M tokens to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from threestep.plugins.audit.recording.files import RecordHead
    from threestep.plugins.audit.recording.sequences import RowSequences
    from training.utils.contracts.run import StepTaken
    from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee


@dataclass(frozen=True)
class WatchedBatch:
    """A micro-batch after its forward. read: float, the log-probabilities or scores that the model returned; None if it
    was not run. loss: its part of the step's."""

    sequences: RowSequences
    read: torch.Tensor | None
    loss: torch.Tensor


Watched = dict[str, list[WatchedBatch]]  # by the name of the model


@dataclass(frozen=True)
class RecordContent:
    """head: of the whole step, the same on every rank. tensors: of this rank, by the names of the schema. notes:
    further settings; those that are 0 or False are as good as absent."""

    head: RecordHead
    tensors: Mapping[str, torch.Tensor]
    notes: Mapping[str, Any] = field(default_factory=dict)


class StepNumbers(NamedTuple):
    """A step in the words of its loop, for its digest. rows: of the dataset; each of the step's on one rank alone.
    figures: of the step, over all ranks. tensors: called once; this rank's integers and floats, by name."""

    rows: Sequence[int] = ()
    figures: Mapping[str, float] = {}
    tensors: Callable[[], Mapping[str, torch.Tensor]] = dict


def step_numbers(
    step: StepTaken, is_main: bool, tensors: Callable[[], Mapping[str, torch.Tensor]] = dict
) -> StepNumbers:
    """The numbers of a step whose rows every rank knows."""
    return StepNumbers(step.row_ids() if is_main else (), step.figures, tensors)


class StepKind(NamedTuple):
    """A kind of training. record: (step, watched) -> the content of its record. numbers: (step, is_main) -> the numbers
    of its digest. has_responses: its rows are whole conversations, not prompts."""

    record: Callable[[Any, Watched], RecordContent]
    numbers: Callable[[Any, bool], StepNumbers] = step_numbers
    has_responses: bool = True


def with_losses(trainee: Trainee, loss: Callable[[MicroBatch], MicroLoss]) -> Trainee:
    """Return the model in training with another function that runs each micro-batch which learns."""
    batches = trainee.micro_batches
    return replace(
        trainee, micro_batches=[replace(each, loss=partial(loss, each)) if each.learns else each for each in batches]
    )


def of_sequences(watched: Sequence[WatchedBatch]) -> dict[str, torch.Tensor]:
    """The sequences of this rank, their tokens, their micro-batches and the parts of the loss."""
    counts = [len(each.sequences.lengths_S) for each in watched]
    return {
        "lengths": joined([each.sequences.lengths_S for each in watched], torch.int64),
        "token_ids": joined([each.sequences.token_ids_T for each in watched], torch.int64),
        "micro_batches": torch.arange(len(watched)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)),
        "micro_losses": joined([each.loss.cpu().reshape(1) for each in watched], torch.float32),
        **_media(watched),
    }


def _media(watched: Sequence[WatchedBatch]) -> dict[str, torch.Tensor]:
    """Media that the model read, as a record has them; nothing where it read none."""
    begins = accumulate((len(each.sequences.token_ids_T) for each in watched), initial=0)
    found: dict[str, list[torch.Tensor]] = {}
    for begin, each in zip(begins, watched, strict=False):
        for name, values in each.sequences.media.items():
            found.setdefault(name, []).append(values + begin if name == "media_begins" else values)
    return {name: torch.cat(parts) for name, parts in found.items()}


def of_targets(watched: Sequence[WatchedBatch]) -> dict[str, torch.Tensor]:
    """`loss_mask`, and `logprobs` if every micro-batch's were read."""
    ones = [each.sequences.spread(torch.ones(len(each.sequences.place_M))) for each in watched]
    found = {"loss_mask": joined(ones, torch.float32) > 0}
    reads = [each.read for each in watched if each.read is not None]
    return {**found, "logprobs": spread(watched, reads)} if len(reads) == len(watched) else found


def spread(watched: Sequence[WatchedBatch], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [T] from each micro-batch's [M]."""
    return joined([each.sequences.spread(own) for each, own in zip(watched, values, strict=True)], torch.float32)


def joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate what may be nothing, on the CPU; float64 stays float64."""
    whole = torch.cat([torch.zeros(0, dtype=dtype), *(part.detach().cpu() for part in parts)])
    return whole if whole.dtype == torch.float64 else whole.to(dtype)


def step_figures(group: str, figures: Mapping[str, float]) -> dict[str, float]:
    """`grad_norm` and `learning_rate` from an engine's figures, named GROUP/..."""
    names = ("grad_norm", "learning_rate")
    return {name: figures[f"{group}/{name}"] for name in names if f"{group}/{name}" in figures}
