"""The flag of a user's function. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.callback.called import load_callback
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class CallbackArguments:
    """The function that follows a run."""

    topic: ClassVar[str] = "log"

    callback: str | None = flag(
        None,
        "Function called on the main rank as fn(step, figures) with the metrics of each step and evaluation. It "
        'returns None, "stop" (end training after this step and save the model) or a dict of further metrics.',
        "file.py:name",
        may_change=True,
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note a function that cannot be called so."""
        if self.callback is not None:
            mistakes.note(load_callback, self.callback)
