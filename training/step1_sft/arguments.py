"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes


@dataclass
class SftArguments:
    """Supervised fine-tuning."""

    learning_rate: float = field(
        default=2e-5, metadata={"help": "Peak learning rate (the default is Alpaca's for full fine-tuning)."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.learning_rate > 0, f"--learning_rate expects more than 0, got {self.learning_rate}")
