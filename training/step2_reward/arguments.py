"""The flags of step 2 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes


@dataclass
class RewardArguments:
    """The reward model."""

    learning_rate: float = field(
        default=1e-5,
        metadata={"help": "Peak learning rate (Llama 2's reward models: 5e-6 to 1e-5, Touvron et al. 2023)."},
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.learning_rate > 0, f"--learning_rate expects more than 0, got {self.learning_rate}")
