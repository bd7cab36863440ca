"""Responses that a step did not train on: what it did to their log-probabilities, to first order and in truth.

H responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, read_text

if TYPE_CHECKING:
    from threestep.plugins.explain.forward.model import Reads, RecordedModel
    from threestep.plugins.explain.updates import Update


@dataclass(frozen=True)
class HeldOutResponses:
    """names: what each is called. sequences: token ids of prompt and response. begins: where each response begins."""

    names: Sequence[str]
    sequences: list[np.ndarray]
    begins: Sequence[int]

    @property
    def mask(self) -> np.ndarray:
        """bool, the tokens of responses, over all sequences."""
        parts = [np.arange(len(ids)) >= begin for ids, begin in zip(self.sequences, self.begins, strict=True)]
        return np.concatenate([np.zeros(0, dtype=bool), *parts])

    def sums(self, reads: Reads) -> np.ndarray:
        """Return [H], the sum over each response of a number of its tokens."""
        assert reads.logprobs_T is not None
        ends = np.cumsum([len(ids) for ids in self.sequences])[:-1]
        return np.array([part.sum() for part in np.split(reads.logprobs_T * self.mask, ends)])


def read_held_out(path: Path, tokenize: Callable[[str], list[int]], end: int | None) -> HeldOutResponses:
    """Read a file of JSON Lines: `prompt` and `response`, texts as the model reads them, or `ids` and `begin`.

    end: the token that ends a response; it is added unless `ended` is false. ThreestepError for other lines.
    """
    names, sequences, begins = [], [], []
    lines = enumerate(read_text(path).splitlines(), start=1)
    for number, line in ((number, line) for number, line in lines if line.strip()):
        where = f"{path}, line {number}"
        row: _HeldOutRow = checked_json(_HeldOutRow, line, where)
        if row.ids is not None:
            ids, begin = row.ids, row.begin
        elif row.prompt is None or row.response is None:
            raise ThreestepError(f"{where}: expected `prompt` and `response`, or `ids` and `begin`")
        else:
            prompt = tokenize(row.prompt)
            ids = [*prompt, *tokenize(row.response)]
            ids += [end] if end is not None and row.ended else []
            begin = len(prompt)
        if not 1 <= begin < len(ids):
            raise ThreestepError(
                f"{where}: expected a prompt and a response of at least one token each, but the response begins at "
                f"token {begin:,} of {len(ids):,}"
            )
        names.append(f"line {number}" if row.name is None else str(row.name))
        sequences.append(np.array(ids))
        begins.append(begin)
    if not names:
        raise ThreestepError(f"--held_out expects a file with at least one line, but {path} has none")
    return HeldOutResponses(names, sequences, begins)


@dataclass(frozen=True)
class _HeldOutRow:
    prompt: str | None = None
    response: str | None = None
    ids: list[int] | None = None
    begin: int = 1
    ended: bool = True
    name: str | int | None = None


@dataclass(frozen=True)
class HeldOutChange:
    """The change of the log-probability of each response [H], nats. before: its value. first_order: along the update.
    real: after the step, less before."""

    before: np.ndarray
    first_order: np.ndarray
    real: np.ndarray


def change_of(held: HeldOutResponses, before: RecordedModel, after: RecordedModel, update: Update) -> HeldOutChange:
    """Return what an update did to each response."""
    first, last = held.sums(before.read(held.sequences)), held.sums(after.read(held.sequences))
    return HeldOutChange(first, held.sums(before.along(held.sequences, update.whole)), last - first)
