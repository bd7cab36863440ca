"""The flags of step 3's rewards. Cheap to import: `--help` reaches this module. Defaults' sources: docs/ppo.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes


@dataclass
class RewardArguments:
    """What a response is rewarded for."""

    reward: str = field(
        default="model:1.0",
        metadata={
            "help": "NAME:WEIGHT,... whose weighted sum scores a response: model (the reward model), embedded, gsm8k, "
            "exact_match, format, regex, length, math, or a function of yours as FILE.py:NAME; without a weight, 1."
        },
    )
    reward_timeout: float = field(
        default=300.0, metadata={"help": "Seconds that a reward function has for the responses of one rollout."}
    )
    reward_regex: str | None = field(
        default=None, metadata={"help": "Of regex: a pattern that is searched for in the response."}
    )
    reward_length_characters: int | None = field(
        default=None, metadata={"help": "Of length: the number of characters that a response is to have."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.reward_timeout > 0, f"--reward_timeout expects more than 0, got {self.reward_timeout}")
        target = self.reward_length_characters
        mistakes.require(
            target is None or target >= 1, f"--reward_length_characters expects a whole number from 1 up, got {target}"
        )
        if self.reward_regex is not None:
            try:
                re.compile(self.reward_regex)
            except re.error as error:
                mistakes.add(f"--reward_regex expects a regular expression, got '{self.reward_regex}': {error}")
