"""The flags of rewards. Cheap to import for `--help`. Sources of the defaults: docs/reference/equations.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from training.utils.base.user_files import check_address, named_object
from training.utils.flags.flags import flag
from training.utils.rewards.table import FORMS, RULES, kind_of

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

SUM, MEAN, MINIMUM, LESS_DEVIATIONS = "sum", "mean", "minimum", "mean_minus_deviations"
COMBINATIONS = (SUM, MEAN, MINIMUM, LESS_DEVIATIONS)
_KINDS = [f"{form} ({note})" for form, note in FORMS.items()]
_FUNCTION = re.compile(r".+\.py:\w+")  # without its weight


class Combination(NamedTuple):
    """The way from several rewards to one score. kind: one of COMBINATIONS. deviations: that mean_minus_deviations
    subtracts."""

    kind: str = SUM
    deviations: float = 1.0


@dataclass
class ScoringArguments:
    """Rewards that score a response."""

    topic: ClassVar[str] = "reward"

    reward: str = flag(
        "model:1.0",
        "Rewards of a response, as a weighted sum NAME:WEIGHT,NAME:WEIGHT. A name is model (the reward model), "
        f"environment (step 3: the sum of --environment's rewards over all turns), {', '.join([*RULES, *_KINDS])}, or "
        "your own function as FILE.py:NAME; the default weight is 1.",
        "names",
    )
    reward_combine: str = flag(
        SUM,
        "How weighted rewards combine into one score: their sum or, for an ensemble, their mean, minimum, or mean "
        "minus --reward_deviations standard deviations.",
        choices=COMBINATIONS,
    )
    reward_deviations: float = flag(
        1.0, "With --reward_combine mean_minus_deviations: number of standard deviations.", "factor >= 0"
    )
    reward_timeout: float = flag(300.0, "Time limit for a reward function in each rollout.", "seconds > 0")
    reward_regex: str | None = flag(None, "With --reward regex: the pattern to search for in the response.", "pattern")
    reward_length_characters: int | None = flag(
        None, "With --reward length: the target length of a response.", "characters >= 1"
    )

    reward_replay: str | None = flag(
        None,
        "With --reward judge or http: the output folder of an earlier run whose verdicts are replayed without sending "
        "requests.",
        "folder",
        may_change=True,
    )

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(
            self.reward_combine == LESS_DEVIATIONS or self.reward_deviations == type(self).reward_deviations,
            f"--reward_deviations {self.reward_deviations:g} applies only to --reward_combine {LESS_DEVIATIONS}, "
            f"but it is {self.reward_combine}; remove one of them",
        )
        if self.reward_regex is not None:
            try:
                re.compile(self.reward_regex)
            except re.error as error:
                mistakes.add(f"--reward_regex expects a regular expression, got '{self.reward_regex}': {error}")

    @property
    def combination(self) -> Combination:
        """Return the way to one score."""
        return Combination(self.reward_combine, self.reward_deviations)

    def check_files(self) -> None:
        """ThreestepError if a file of --reward does not exist, or has mistaken settings; nothing is loaded."""
        for entry in self.reward.split(","):
            function = _FUNCTION.match(entry.strip())
            if function is not None:
                check_address(function[0], "--reward")
            kind = kind_of(entry.strip())
            if kind is not None and kind.check:
                named_object(kind.check)(entry.strip())


@dataclass
class CheckerArguments:
    """A rule that nothing is trained on."""

    checker: str | None = flag(
        None,
        "Rule that scores held-out responses, for evaluation only: a rule of --reward, or your own as FILE.py:NAME.",
        "name",
        topic="evaluation",
    )
