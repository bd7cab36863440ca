"""The flags of rewards. Cheap to import for `--help`. Sources of the defaults: docs/ppo.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from training.utils.rewards.rules import RULES
from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag


@dataclass
class ScoringArguments:
    """What scores a response."""

    reward: str = flag(
        "model:1.0",
        f"NAME:WEIGHT,... whose weighted sum scores a response: model (the reward model), "
        f"{', '.join(RULES)}, or your own function as FILE.py:NAME. The default weight is 1.",
    )
    reward_timeout: float = flag(300.0, "Seconds that a reward function may take per rollout.", above=0)
    reward_regex: str | None = flag(None, "Reward regex: the pattern to search for in the response.")
    reward_length_characters: int | None = flag(
        None, "Reward length: the target length of a response in characters.", least=1
    )

    def validate(self, mistakes: Mistakes) -> None:
        if self.reward_regex is not None:
            try:
                re.compile(self.reward_regex)
            except re.error as error:
                mistakes.add(f"--reward_regex expects a regular expression, got '{self.reward_regex}': {error}")
