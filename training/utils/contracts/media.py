"""What a run's rows hold besides text, as those see it who hand it on. Images implement it (`images.models.pictured`).

M numbers: log-probabilities of targets, or scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from training.utils.images.row_media import MediaRun, RowMedia, row_media
from training.utils.images.spans import ImageSpan, images_between

if TYPE_CHECKING:
    import numpy as np
    import torch

    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.images.spans import ImagePixels


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
Decode = Callable[[Sequence[int]], str]


class MediaReader(Protocol):
    """What one model reads of media. sentence: one line for a log."""

    @property
    def sentence(self) -> str: ...

    def parts(self) -> Mapping[str, str]:
        """Return its settings, in words."""

    def parts_of_rows(self, allow_urls: bool) -> Mapping[str, str]:
        """Return what rows depend on, for the cache's fingerprint."""

    def of_rows(self, store: Any, allow_urls: bool) -> ReadsMedia:
        """Return what reads the media of rows, whose bytes it adds to a store."""

    def of_stored(self, stored: Any) -> SeenMedia:
        """Return the media of a store."""

    def counting(self, decode: Decode) -> Decode:
        """Return `decode` with the tokens of a medium written once, with their number."""


class ShownMedium(Protocol):
    """A medium for people to see. kind: a word for it. name: its sha256 in hex. words: its size, and where its tokens
    stand."""

    kind: str

    @property
    def name(self) -> str: ...

    @property
    def words(self) -> str: ...

    def small(self, longest_side: int) -> bytes:
        """Return a copy as PNG, neither side of which has more pixels than that."""

    def uri(self) -> str:
        """Return the address of a small copy for a page, which holds it."""


class SeenMedia(Protocol):
    """Media that were read, by their rows."""

    @property
    def reader(self) -> MediaReader: ...

    def __call__(self, keys: Sequence[int]) -> ImagePixels:
        """Return what a model reads of media. keys: of a row's, in their order."""

    def encoded(self, key: int) -> bytes:
        """Return a medium as it is stored."""

    def shown(self, media: Sequence[Any]) -> Iterator[ShownMedium]:
        """Yield the media of a row, in the order of their tokens."""


class ReadsMedia(Protocol):
    """Reads the media of rows for one model, and stores them. Raises BadConversation for those that do not fit."""

    @property
    def reader(self) -> MediaReader: ...

    @property
    def seen(self) -> SeenMedia:
        """The media that it has read so far."""

    def placed(self, messages: Any, values: Any, folder: str | None, where: str, /) -> Any:
        """Return the messages with the places of their media, and these media. folder: that paths are relative to."""

    def expanded(self, pieces: Any, media: Any, where: str, /) -> list[Any]:
        """Return the pieces of a rendered conversation with all that the model reads for each medium."""

    def spans(self, ids: list[int], media: Any, where: str, /) -> tuple[ImageSpan, ...]:
        """Return the media among the tokens of a row."""


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


class PlannedMedia(Protocol):
    """The memory of media that forwards may hold. sentence: what is counted."""

    @property
    def sentence(self) -> str: ...

    def of_tokens(self, tokens: int) -> PlannedMedia:
        """Return the same for forwards with so many tokens of media."""

    def lines(self, model: Any, gradient_checkpointing: bool = False, beside: int | None = None) -> list[Any]:
        """Return what media add to a forward of a model on the meta device, as MemoryLines; nothing of one of text.

        beside: bytes that the language model's forward saves for a backward; None: it has no backward.
        """


class MediaForward(Protocol):
    """A model's own forward of rows with media, measured."""

    @property
    def media(self) -> Any:
        """The media of the run: its `RunMedia`."""

    @property
    def numbers_M(self) -> torch.Tensor:
        """Of some examples of the run, float64 on the CPU."""

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
