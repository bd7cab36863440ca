"""Responses in more than one piece, as plugins add them: conversations in turns, and forms whose tokens are not one run
(`row_forms` of `Plugin.tables`). Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections import Counter

    import torch
    from transformers import PreTrainedModel

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.documents import Document, TokenSequence


@dataclass(frozen=True)
class NextTurn:
    """A turn to be drawn.

    key: of its conversation, hashable, which has one turn at a time.
    ids: all tokens of the conversation so far, 1 or more. Most of them are usually those that it had, in its turn
        before, but need not be.
    most_tokens: that are drawn, 1 or more.
    media: among `ids`, in the form of what draws.
    """

    key: Any
    ids: Sequence[int]
    seed: int
    most_tokens: int
    media: Sequence[Any] = ()


@dataclass(frozen=True)
class DrawnTurn:
    """ids, logprobs: of its tokens, 1 or more. ended: by itself, False where it was cut. experts_TLK: of a mixture of
    experts, of the tokens before it and its own, from the first on; None where they are not recorded."""

    key: Any
    ids: list[int]
    logprobs: list[float]
    ended: bool
    experts_TLK: Any = None


class Turns(ABC):
    """The turns of a rollout. Which tokens each draws depends on its tokens and its seed, not on others, nor on when
    they come; how their log-probabilities are rounded, on which turns are added before which `advance`.

    in_rounds: a turn is drawn soonest together with others; answers are waited for, so that they come together.
    steps: tokens that a turn could have drawn since the beginning: a clock that no delay moves.
    """

    in_rounds: ClassVar[bool] = False
    steps: int = 0

    @abstractmethod
    def add(self, turn: NextTurn) -> None:
        """Draw a turn, from the next `advance` on."""

    @abstractmethod
    def advance(self) -> list[DrawnTurn]:
        """Draw some tokens of the turns that were added; return those that are over, often none."""

    @property
    @abstractmethod
    def is_drawing(self) -> bool:
        """True if some added turns are not over."""

    def drop(self, key: Any) -> None:  # noqa: B027 (those that keep nothing have nothing to drop)
        """A conversation has no further turn."""

    def close(self) -> None:  # noqa: B027
        """No turn is drawn any more, also where some were added that are not over."""


class TurnDrawing(ABC):
    """Draws turns by a transformers model in this process, where an engine has no way of its own."""

    @abstractmethod
    def check(self, model: PreTrainedModel, own: Any, way: Any, obstacle: str | None) -> list[str]:
        """Choose how to draw; return sentences on what that costs. own, way: as of `DecodeLoop.check`. obstacle: why
        the engine's own `roll_out` has to draw them"""

    @abstractmethod
    def open(self, model: PreTrainedModel, sampling: Any, stop: Any, end_check_tokens: int) -> Turns | None:
        """Return what draws the turns of a rollout, after `check`; None where `roll_out` does. sampling: a `Sampling`.
        stop: as of `DecodeLoop.drawn`. end_check_tokens: between two looks at which turns are over"""


class RowForm(Protocol):
    """The form of one row. numbers: what the row's column in files holds, by which its class is made again. figure:
    of the share of drawn responses with parts beside each other, `rollout/FIGURE` in the log."""

    @property
    def figure(self) -> str: ...

    @property
    def numbers(self) -> tuple[int, ...]: ...

    def sentence(self, sequence: TokenSequence) -> Document:
        """Lay out a prompt and response in one, or a conversation; the form is that of what carries loss."""

    def responses(self, prompt: TokenSequence, responses: Sequence[TokenSequence], are_drawn: bool) -> Document:
        """Lay out responses that share a prompt. are_drawn: by a model, in this form, with mistakes that a row of a
        dataset may not have."""


class FormReader(Protocol):
    """Reads which rows of a dataset have the form. Methods raise Dropped for a row to leave out, and ThreestepError for
    a mistake.

    texts: the ids of a row's responses, or of one whole conversation with the loss mask `loss`
    """

    def form_of(self, texts: Sequence[Sequence[int]], where: str, loss: Sequence[bool] | None = None) -> RowForm | None:
        """Return the form of a row before it is cut; None: one run of tokens. where: names the row."""

    def check_cut(
        self, texts: Sequence[Sequence[int]], loss: Sequence[bool] | None = None, may_end_open: bool = False
    ) -> None:
        """Check a row with the form that was cut. may_end_open: its last part may be cut."""


class OpenedForm(ABC):
    """A form in the tokens of a tokenizer.

    layout: of responses that a model draws
    parts: of the fingerprint of cached rows
    decides: what decides about a rollout, by name, as JSON holds it
    """

    @property
    @abstractmethod
    def layout(self) -> RowForm: ...

    @property
    @abstractmethod
    def parts(self) -> dict[str, str]: ...

    @property
    @abstractmethod
    def decides(self) -> dict[str, Any]: ...

    @abstractmethod
    def reader(self, counts: Counter[str]) -> FormReader:
        """Return what reads rows, and counts those of each kind."""

    @abstractmethod
    def draw(self, model: PreTrainedModel, request: Any) -> Any:
        """Return the `Rollout` of a `RolloutRequest`, with `formed`, from a model that `check_model` let pass."""

    @abstractmethod
    def parts_of(self, response_ids_r: torch.Tensor) -> tuple[int, ...]:
        """Return of each place where a drawn response has parts beside each other, how many."""


class TextForm(ABC):
    """A form that flags ask for.

    flag: that does. tokens: that the tokenizer must have; those that it lacks are added
    hints: advice where all rows are dropped, by the reason
    draws, beside_media: the end of a sentence on how it draws, and on why prompts with media do not go with that
    rows: that a response takes at most while it is drawn
    """

    flag: ClassVar[str]
    draws: ClassVar[str]
    beside_media: ClassVar[str]
    tokens: Sequence[str] = ()
    hints: Mapping[str, str] = {}
    rows: int = 1

    def check(self, data: Any, mistakes: Mistakes) -> None:  # noqa: B027 (there may be none)
        """Note settings of rows that do not go with it. data: the `DataArguments`"""

    @abstractmethod
    def check_model(self, model: PreTrainedModel, masks_are_ours: bool) -> None:
        """ThreestepError if nothing can be drawn in this form from a model. masks_are_ours: it takes the masks that it
        is given"""

    @abstractmethod
    def opened(self, tokenizer: Any) -> OpenedForm:
        """ThreestepError if the tokenizer cannot write it."""
