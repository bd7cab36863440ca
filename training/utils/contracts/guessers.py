"""A head that is trained beside a model, and guesses its next tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class LentHead(Protocol):
    """A head that guesses tokens, with whole weights while it is lent.

    depths: its modules, of which the first guesses: `trunk` runs over entries, which `joined` makes of the embedding of
        a token and the model's state before it.
    """

    depths: Any

    def state_dict(self) -> dict[str, Any]: ...


# Lends such a head; every rank must enter together.
BorrowHead = Callable[[], AbstractContextManager[LentHead]]
