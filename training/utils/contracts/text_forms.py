"""Forms of responses whose tokens are not one run, as plugins add them (`row_forms` of `Plugin.tables`):
parts of a response that do not see each other. In the core there is none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections import Counter

    import torch
    from transformers import PreTrainedModel

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.documents import Document, TokenSequence
    from training.utils.contracts.rollout import Rollout


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
    def draw(self, model: PreTrainedModel, request: Any) -> Rollout:
        """Return the responses to a `RolloutRequest`, with `formed`, from a model that `check_model` let pass."""

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
