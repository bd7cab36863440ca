"""Media in rows that are laid out: their positions, which of their tokens see each other, and what was read of them.

N rows, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.media_spans import MediaSpan, position_axes


class ReadMedia(Protocol):
    """The input of a model for the media of some rows. name: of the media, in the plural."""

    name: ClassVar[str]

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model's forward."""

    def recorded(self, places: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the media at these places among them, by a record's names."""


class MediaRun(NamedTuple):
    """The media of a segment that begins at `column` of row `row`, at position `first_position`."""

    row: int
    column: int
    tokens: int
    first_position: int
    media: tuple[MediaSpan, ...]


@dataclass(frozen=True)
class RowMedia:
    """The media of rows.

    axes_3NT: int64, positions along time, height and width, which replace `position_ids_NT`; None unless a medium
        counts by its sides.
    blocks_NT: int64, a number above 0 for each medium whose tokens all see each other, 0 elsewhere; None without such
        media.
    spans: in the order of their tokens, row by row. A medium of a shared prompt is there once.
    counts: how many of these each document has.
    places: flat position n*T+t of the first token of each.
    read: what a model reads of them; given to the rows by `RunMedia.loaded`.
    """

    axes_3NT: torch.Tensor | None
    blocks_NT: torch.Tensor | None
    spans: tuple[MediaSpan, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...] = ()
    read: ReadMedia | None = None

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model's forward for the media."""
        assert self.read is not None, "media that are not read would count as a text"
        return self.read.inputs(model, device)

    def recorded(self, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the media of sequences by a record's names, one sequence after the other. places: [T] of each
        sequence's tokens, flat positions that rise."""
        assert self.read is not None, "a record holds what the model read"
        begins, held, begin = [], [], 0
        for own in places:
            found = torch.searchsorted(own, torch.tensor(self.places)).tolist()
            for index, place in enumerate(found):
                if place < len(own) and int(own[place]) == self.places[index]:
                    begins.append(begin + place)
                    held.append(index)
            begin += len(own)
        recorded = {
            "media_begins": torch.tensor(begins, dtype=torch.int64),
            "media_tokens": torch.tensor([self.spans[index].tokens for index in held], dtype=torch.int64),
        }
        return recorded | self.read.recorded(held)

    @property
    def positions(self) -> dict[str, torch.Tensor]:
        """The argument of forward that replaces the positions of a text."""
        return {} if self.axes_3NT is None else {"position_ids": self.axes_3NT}

    def refuse_attention(self, implementation: str, expected: Sequence[str]) -> None:
        """Raise ThreestepError for an attention of all rows as one, which the positions would not fit into."""
        *first, last = expected
        raise ThreestepError(
            f"rows with {self._name} expect --attn_implementation {', '.join(first)} or {last}, got {implementation}"
        )

    def refuse_noise(self) -> None:
        """Raise ThreestepError: without ids, transformers finds the places of media by comparing embeddings."""
        raise ThreestepError(f"noise on the embeddings would hide the places of {self._name}; leave it out")

    @property
    def _name(self) -> str:
        return "media" if self.read is None else self.read.name


def media_of_rows(documents: Iterable[list[MediaRun]], position_ids_NT: torch.Tensor) -> RowMedia | None:
    """Return the media of the segments of each document; None without any."""
    by_document = list(documents)
    runs = [run for own in by_document for run in own]
    spans = tuple(span for run in runs for span in run.media)
    if not spans:
        return None
    return RowMedia(
        axes_3NT=_axes(runs, position_ids_NT) if any(span.sides for span in spans) else None,
        blocks_NT=_blocks(runs, position_ids_NT) if any(span.sees_itself for span in spans) else None,
        spans=spans,
        counts=tuple(sum(len(run.media) for run in own) for own in by_document),
        places=tuple(
            run.row * position_ids_NT.shape[1] + run.column + span.begin for run in runs for span in run.media
        ),
    )


def _axes(runs: list[MediaRun], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `RowMedia.axes_3NT`; padding is where `position_ids_NT` has it."""
    axes_3NT = position_ids_NT.repeat(3, 1, 1)
    for run in runs:
        axes_3T = run.first_position + position_axes(run.tokens, run.media)
        axes_3NT[:, run.row, run.column : run.column + run.tokens] = axes_3T
    return axes_3NT


def _blocks(runs: list[MediaRun], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `RowMedia.blocks_NT`."""
    blocks_NT, number = torch.zeros_like(position_ids_NT), 0
    for run in runs:
        for span in run.media:
            if span.sees_itself:
                number += 1
                blocks_NT[run.row, run.column + span.begin : run.column + span.end] = number
    return blocks_NT
