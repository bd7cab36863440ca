"""The flag of the user's DeepSpeed configuration. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag


@dataclass
class DeepSpeedJsonArguments:
    """The file."""

    topic: ClassVar[str] = "memory"

    deepspeed_config: str | None = flag(
        None, "Your own DeepSpeed JSON file. Missing keys are filled in and logged.", "file"
    )
