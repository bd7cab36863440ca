"""Media beside text in a run's rows, as rooms that pass them on see them, and what a plugin that reads them gives.

The core keeps their spans among tokens (`MediaSpan`, `RowMedia`) and their bytes in one store beside the rows. A
plugin's `MediaKind` makes all the rest: it reads values of rows, knows families of models, and gives a run its
`RunMedia`.

M numbers: log-probabilities of targets, or scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from training.utils.contracts.documents import Document, MediaSpan
    from training.utils.contracts.token_rows import ReadMedia, TokenRows

Read = Callable[["TokenRows"], "torch.Tensor"]
Decode = Callable[[Sequence[int]], str]
# Keeps copies of the media of a row, which samples show; returns their names.
Keep = Callable[[Sequence[Any]], list[str]]


class MediaReader(Protocol):
    """A model's reader of media. sentence: one line for a log. parts: its settings, by name. flags: added, of rows."""

    @property
    def sentence(self) -> str: ...
    def parts(self) -> Mapping[str, str]: ...
    def counting(self, decode: Decode) -> Decode: ...
    def parts_of_rows(self, flags: Any) -> Mapping[str, str]: ...
    def of_rows(self, store: Any, flags: Any) -> ReadsMedia: ...
    def of_stored(self, stored: Any) -> SeenMedia: ...


class ShownMedium(Protocol):
    """A medium for people to see. kind: a word for it. name: its sha256 in hex. words: its size, and where its tokens
    stand. small: a copy as PNG. uri: the address of one for a page, which holds it."""

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
    def __call__(self, keys: Sequence[int]) -> ReadMedia: ...
    def encoded(self, key: int) -> bytes: ...
    def shown(self, media: Sequence[Any]) -> Iterator[ShownMedium]: ...


class RowMedium(Protocol):
    """A medium of a row that is made. digest: its sha256 in hex."""

    @property
    def digest(self) -> str: ...


class ReadsMedia(Protocol):
    """Reads the media of rows for one model, and stores them.

    seen: those read so far. placed: messages with parts that mark the places of media, and these in that order.
    expanded: pieces of a rendered conversation with all that the model reads for each. spans: of a row's tokens.
    after_cut: those of a row of which the tokens at `kept`, ascending, stay; Dropped where that cuts a medium.
    """

    @property
    def reader(self) -> MediaReader: ...
    @property
    def seen(self) -> SeenMedia: ...
    def placed(self, messages: Any, values: Any, folder: str | None, where: str, /) -> Any: ...
    def expanded(self, pieces: Any, media: Any, where: str, /) -> list[Any]: ...
    def spans(self, ids: list[int], media: Any, where: str, /) -> tuple[MediaSpan, ...]: ...
    def after_cut(self, media: Sequence[MediaSpan], kept: Sequence[int], /) -> tuple[MediaSpan, ...]: ...


class PromptMedia(Protocol):
    """The media of a batch of prompts on their way to a model. spans: of each prompt, counted from its first token."""

    @property
    def spans(self) -> tuple[tuple[MediaSpan, ...], ...]: ...

    def positions(self, mask_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [B, 1], the position of the token behind each left-padded prompt; and the positions of their tokens
        [3, B, P], if a medium counts by its sides (M-RoPE). int64."""

    def forward_kwargs(self, model: Any, mask_BP: torch.Tensor, accepted: Container[str]) -> dict[str, Any]:
        """Return the arguments of the model's forward for left-padded prompts. accepted: by name."""

    def picked(self, prompts: Sequence[int]) -> PromptMedia:
        """Return those of the prompts with these indices."""

    def in_parts(self, length: int, most: int) -> Iterator[tuple[int, int, PromptMedia]]:
        """Yield the only prompt, of `length` tokens, in parts of at most `most`, none of which cuts a medium: its first
        token, its end, its media."""

    def repeated(self, samples_per_prompt: int) -> tuple[tuple[MediaSpan, ...], ...]:
        """Return the spans of each sequence, where a prompt has so many adjacent ones."""


class RunMedia(Protocol):
    """The media of a run's rows. name: in messages, in the plural."""

    name: ClassVar[str]

    @property
    def alone(self) -> Document:
        """The smallest medium by itself, with nothing to predict."""

    def loaded(self, rows: TokenRows) -> TokenRows:
        """Return rows with what a model reads of their media; rows of text alone as they are."""

    @property
    def examples(self) -> tuple[Document, ...]:
        """A few short documents of one sequence with media, by which a model is read before training."""

    def of_prompts(self, media: Sequence[tuple[MediaSpan, ...]]) -> PromptMedia | None:
        """Return what a rollout engine takes of these prompts' media; None where none of them has some."""

    def measured(self, model: Any) -> MediaForward:
        """Return the numbers of a model's own forward of some rows with media. ThreestepError if that fails."""


@dataclass(frozen=True)
class SentMedium:
    """A medium that a client sent. ids: all that a model reads of it. media: where it stands among these. data: as it
    came."""

    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...]
    data: bytes


class SentMedia(Protocol):
    """Reads media that clients of a server send for one model.

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
    """The memory of media that forwards may hold. sentence: what is counted."""

    @property
    def sentence(self) -> str: ...
    def of_tokens(self, tokens: int) -> PlannedMedia: ...
    def kept(self, added: Any) -> Any:
        """Return the line of the table for what `MediaKind.kept_mb` allows."""

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


class MediaFile(Protocol):
    """A file that was read. data: the medium as it is stored. words: its name and size."""

    @property
    def path(self) -> Path: ...
    @property
    def data(self) -> bytes: ...
    @property
    def words(self) -> str: ...


class RecordedMedia(Protocol):
    """The media of one sequence of a record."""

    def inputs(self, config: Any, tokens: int, accepted: Container[str], dtype: Any) -> dict[str, torch.Tensor]:
        """Return the arguments of a model's forward. config: of the model. tokens: that it reads. accepted: names of
        arguments."""

    def shown(self, config: Any, scale: Any) -> list[str]:
        """Return the address of each medium on a page. scale: of `MediaKind.scale_of`."""


class MediaKind(ABC):
    """The questions that programs ask of media. A plugin's answers are imported once a model reads more than text.

    why_dropped: by the reasons for which `ReadsMedia.after_cut` drops rows, these in words.
    """

    why_dropped: ClassVar[Mapping[str, str]]

    @abstractmethod
    def reader_of(self, name_or_path: str, config: Any, tokenizer: Any) -> MediaReader | None:
        """Return the reader of a model of more than text, by its folder or hub name; None where it has none."""

    @abstractmethod
    def why_unread(self, config: Any, name_or_path: str) -> str:
        """Return why media are not read for a model of more than text that has no reader: ends "a row holds
        media, and ..."."""

    @abstractmethod
    def of_rows(self, rows: Iterable[Any], seen: SeenMedia, document_of: Callable[[Any], Document]) -> RunMedia | None:
        """Return the media of rows; None if no row has any. document_of: makes the layout's document of a row."""

    @abstractmethod
    def check_beside(self, settings: Mapping[str, Any]) -> None:
        """ThreestepError for a flag that does not go with rows that have media. settings: of all flags, by name."""

    @abstractmethod
    def kept_mb(self, added: Any) -> int:
        """Return the MiB of host memory for what models make of media. added: the run's `AddedFlags`."""

    @abstractmethod
    def with_kept_features(self, media: RunMedia, most_mb: int, model: Any, engine: Any, *, read: Read) -> RunMedia:
        """Return the media with up to `most_mb` MiB kept of what `model` makes of them before its language model reads
        that. engine: of the model. read: numbers of rows by it. ThreestepError for a model that cannot."""

    @abstractmethod
    def kept_for_readers(
        self,
        media: RunMedia,
        most_mb: int,
        engine: Any,
        readers: Mapping[str, tuple[Any, Read]],
        *,
        log: Callable[..., None],
    ) -> RunMedia:
        """Return the same for several models, the first of which `engine` trains. readers: by name, each a model and
        numbers of rows by it."""

    @abstractmethod
    def planned(self, name_or_path: str, trust_remote_code: bool, most: int, at_once: int) -> PlannedMedia | None:
        """Return the memory of media for a model of more than text. most: tokens of media in a forward. at_once: in all
        forwards that are laid out together."""

    @abstractmethod
    def keeper(self, folder: Any, seen: SeenMedia) -> Keep:
        """Return what keeps media of samples in a run's folder."""

    @abstractmethod
    def keep(self, folder: Any, seen: SeenMedia, rows: Iterable[Any]) -> None:
        """Keep the media of rows whose samples name them already."""

    @abstractmethod
    def for_rewards(self, seen: SeenMedia, row: Any) -> dict[str, Any]:
        """Return the column that shows the media of a prompt to reward functions."""

    @abstractmethod
    def of_chat(self, reader: MediaReader, data: Any, tokenizer: Any) -> tuple[ReadsMedia, RunMedia]:
        """Return what reads the media of the messages of a conversation with a finished model, and the model's input
        for them. data: `DataArguments` with the prompt style of the model."""

    @abstractmethod
    def of_clients(self, reader: MediaReader, tokenizer: Any) -> SentMedia:
        """Return what reads media that clients of a server send."""

    @abstractmethod
    def why_unscored(
        self, name_or_path: str, tokenizer: Any, reader: MediaReader | None, sides: Sequence[tuple[Any, MediaReader]]
    ) -> str | None:
        """Return why a reward model does not score answers about media; None where it does. tokenizer, reader: of it.
        sides: of models that answer, the tokenizer of each and its reader."""

    @abstractmethod
    def check_read_alike(self, paths: tuple[str, str], readers: tuple[MediaReader, MediaReader]) -> None:
        """ThreestepError if actor and critic read media otherwise."""

    @abstractmethod
    def opened_file(self, given: str) -> MediaFile:
        """Read a file of the user's machine. ThreestepError if there is none, and for one that cannot be read."""

    @abstractmethod
    def encoded(self, value: Any, where: str) -> bytes:
        """Return an object in memory as bytes of a file. BadConversation, from `where` on, for
        one that cannot be stored."""

    @abstractmethod
    def recorded(self, rank: Mapping[str, np.ndarray]) -> Mapping[int, RecordedMedia]:
        """Return, by the sequence of a rank's record, the media of those that have some."""

    @abstractmethod
    def scale_of(self, folder: Path) -> Any:
        """Return what `RecordedMedia.shown` takes of a model's folder; None where it has nothing."""
