"""What a group of flags says against its values."""

from __future__ import annotations

from typing import Any

from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes


def mistakes_of(arguments: Any) -> list[str]:
    """Return the sentences, one for each mistake."""
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences
