"""The protocol of drawing conversations in turns: each turn is added, drawn, and answered while others are
drawn. Any engine can do it in rounds; an engine's own (`turns_of`) keep what they have computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    experts, of the tokens before it and its own (`Response`); None where they are not recorded."""

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
