"""Media beside text in a run's rows, as rooms that pass them on see them. Images are one (`images.models.pictured`).

M numbers: log-probabilities of targets, or scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from training.utils.images.row_media import MediaRun, RowMedia, row_media
from training.utils.images.spans import ImageSpan, images_between

if TYPE_CHECKING:
    import numpy as np
    import torch

    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows


def media_of_rows(documents: Iterable[list[MediaRun]], position_ids_NT: torch.Tensor) -> RowMedia | None:
    """Return the media of rows that hold these documents, each given by its segments; None without any."""
    return row_media(documents, position_ids_NT)


def media_between(media: Sequence[ImageSpan], begin: int, end: int) -> tuple[ImageSpan, ...]:
    """Return the media of the tokens [begin, end) of a sequence, counted from `begin`; AssertionError if that cuts
    one."""
    return images_between(media, begin, end)


def media_numbers(media: Sequence[ImageSpan]) -> np.ndarray:
    """Return media as int32 numbers."""
    from training.utils.images.numbers import span_numbers

    return span_numbers(media)


def media_of_numbers(numbers: np.ndarray) -> tuple[ImageSpan, ...]:
    """Return the media that `media_numbers` made numbers of."""
    from training.utils.images.numbers import spans_of

    return spans_of(numbers)


Read = Callable[["TokenRows"], "torch.Tensor"]


class RunMedia(Protocol):
    """The media of a run's rows. name: in messages, in the plural."""

    name: ClassVar[str]

    @property
    def alone(self) -> Document:
        """The smallest medium by itself, with nothing to predict."""

    def loaded(self, rows: TokenRows) -> TokenRows:
        """Return rows with what a model reads of their media; rows of text alone as they are."""

    def of_prompts(self, media: Sequence[tuple[Any, ...]]) -> Any:
        """Return what a rollout engine takes of these prompts' media; None where none of them has some."""

    def measured(self, model: Any) -> MediaForward:
        """Return the numbers of a model's own forward of some rows with media. ThreestepError if that fails."""


class MediaForward(Protocol):
    """A model's own forward of rows with media, measured."""

    @property
    def media(self) -> Any:
        """The media of the run: its `RunMedia`."""

    @property
    def numbers_M(self) -> torch.Tensor:
        """The numbers of some examples of the run, float64 on the CPU."""

    @property
    def tolerance(self) -> float:
        """The largest root mean square of a difference that rounding explains."""

    @property
    def of_scores(self) -> bool:
        """The model is a scalar model."""

    def why_not(self, read: Read, device: torch.device, text: Document | None) -> str | None:
        """Return None if rows with media give these numbers, and a medium changes those of its document alone; else the
        reason why not.

        text: a document without media that shares a row with those that have some; None: each has a row of its own.
        """
