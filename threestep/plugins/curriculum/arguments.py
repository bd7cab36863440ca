"""The flags of the choice of prompts. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.user_files import check_address
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class CurriculumArguments:
    """Classes of the user's own."""

    topic: ClassVar[str] = "data"

    prompt_sampler: str | None = flag(
        None,
        "Your PromptSampler class, which picks the prompts of each rollout and sees its scores; default: shuffled "
        "epochs.",
        "file.py:name",
    )
    prompt_dataset: str | None = flag(
        None, "Your PromptDataset class, whose prompts may change after each rollout.", "file.py:name"
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note addresses of files that are not there."""
        for name in ("prompt_sampler", "prompt_dataset"):
            if getattr(self, name) is not None:
                mistakes.note(check_address, getattr(self, name), f"--{name}")
