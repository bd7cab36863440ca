"""Media beside text in a run's rows, as rooms that pass them on see them. Images are one (`images.models.pictured`).

M numbers: log-probabilities of targets, or scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from training.utils.images.row_media import MediaRun, media_of_rows  # noqa: F401 (for layouts)
from training.utils.images.spans import media_between  # noqa: F401 (for samples)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.images.spans import ImagePixels, ImageSpan


def media_numbers(media: Sequence[ImageSpan]) -> np.ndarray:
    """Return media as int32 numbers."""
    from training.utils.images.numbers import span_numbers

    return span_numbers(media)


def media_of_numbers(numbers: np.ndarray) -> tuple[ImageSpan, ...]:
    """Return the media that `media_numbers` made numbers of."""
    from training.utils.images.numbers import spans_of

    return spans_of(numbers)


Read = Callable[["TokenRows"], "torch.Tensor"]
Decode = Callable[[Sequence[int]], str]


class MediaReader(Protocol):
    """A model's reader of media (`images.data.reader`). sentence: one line for a log. parts: its settings."""

    @property
    def sentence(self) -> str: ...
    def parts(self) -> Mapping[str, str]: ...
    def counting(self, decode: Decode) -> Decode: ...
    def parts_of_rows(self, allow_urls: bool) -> Mapping[str, str]: ...
    def of_rows(self, store: Any, allow_urls: bool) -> ReadsMedia: ...
    def of_stored(self, stored: Any) -> SeenMedia: ...


class ShownMedium(Protocol):
    """A medium for people to see (`images.data.shown`). kind: a word for it. name: its sha256 in hex. words: its size,
    and where its tokens stand. small: a copy as PNG. uri: the address of one for a page, which holds it."""

    kind: str

    @property
    def name(self) -> str: ...
    @property
    def words(self) -> str: ...
    def small(self, longest_side: int) -> bytes: ...
    def uri(self) -> str: ...


class SeenMedia(Protocol):
    """Media that were read. The call returns what a model reads of them, by keys in the order of a row; `encoded` one
    as it is stored; `shown` those of a row, in the order of their tokens."""

    @property
    def reader(self) -> MediaReader: ...
    def __call__(self, keys: Sequence[int]) -> ImagePixels: ...
    def encoded(self, key: int) -> bytes: ...
    def shown(self, media: Sequence[Any]) -> Iterator[ShownMedium]: ...


class ReadsMedia(Protocol):
    """Reads the media of rows for one model, and stores them (`images.data.row_pictures`). seen: those read so far."""

    @property
    def reader(self) -> MediaReader: ...
    @property
    def seen(self) -> SeenMedia: ...
    def placed(self, messages: Any, values: Any, folder: str | None, where: str, /) -> Any: ...
    def expanded(self, pieces: Any, media: Any, where: str, /) -> list[Any]: ...
    def spans(self, ids: list[int], media: Any, where: str, /) -> tuple[ImageSpan, ...]: ...


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


@dataclass(frozen=True)
class SentMedium:
    """A medium that a client sent. ids: all that a model reads of it. media: where it stands among these. data: as it
    came."""

    ids: tuple[int, ...]
    media: tuple[ImageSpan, ...]
    data: bytes


class SentMedia(Protocol):
    """Reads media that clients of a server send for one model (`images.run.sent_images`).

    placeholder_id: the token that stands for each of a medium. most: media of a sequence; None without a bound.
    run: of a few examples.
    """

    placeholder_id: int
    most: int | None

    @property
    def run(self) -> RunMedia: ...

    def read(self, kind: str, given: Mapping[str, Any], where: str) -> SentMedium:
        """Read a medium. kind: the sender's word for it. ThreestepError, from `where` on, for one that is none."""

    def of(self, sent: Sequence[bytes]) -> RunMedia:
        """Return these as the media of rows, each by its place as its key."""


class PlannedMedia(Protocol):
    """The memory of media that forwards may hold (`images.run.planned_images`). sentence: what is counted."""

    @property
    def sentence(self) -> str: ...
    def of_tokens(self, tokens: int) -> PlannedMedia: ...
    def lines(self, model: Any, gradient_checkpointing: bool = False, beside: int | None = None) -> list[Any]: ...


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
