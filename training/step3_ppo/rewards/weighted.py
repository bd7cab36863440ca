"""Which rewards a run has, with their weights: `--reward gsm8k:1.0,model:0.5,my_file.py:my_reward`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.step3_ppo.records import Rollout
from training.step3_ppo.reward_arguments import RewardArguments
from training.step3_ppo.rewards import RULE_NAMES, rule_named
from training.step3_ppo.rewards.calling import Rule
from training.utils.run.errors import Mistakes, ThreestepError, nearest_names
from training.utils.run.user_files import is_address, load_function

MODEL = "model"
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Reward:
    """name: under which it is logged. rule: None is the reward model."""

    name: str
    weight: float
    rule: Rule | None


@dataclass(frozen=True)
class Rewards:
    """named: whose weighted sum scores a response. columns: that any prompt of the dataset carries. texts_of: a
    rollout's responses as text; None where there are no rules to read them."""

    named: tuple[Reward, ...]
    timeout_seconds: float
    columns: tuple[str, ...] = ()
    texts_of: Callable[[Rollout], Sequence[str]] | None = None

    @property
    def with_model(self) -> bool:
        return reads_model(self.named)


def reads_model(named: Sequence[Reward]) -> bool:
    """Whether the reward model is among them."""
    return any(reward.rule is None for reward in named)


MODEL_ALONE = Rewards((Reward(MODEL, 1.0, None),), RewardArguments().reward_timeout)


def named_rewards(flags: RewardArguments, mistakes: Mistakes) -> tuple[Reward, ...]:
    """Return the rewards of --reward, and note those that nothing is or that have one name."""
    found: list[Reward] = []
    for entry in flags.reward.split(","):
        address, weight = _parted(entry.strip())
        name, rule = address.rpartition(":")[2], None
        if address != MODEL:
            rule = mistakes.note(found_rule, address, flags, "--reward", (MODEL, *RULE_NAMES))
            if rule is None:
                continue
        mistakes.require(
            all(name != other.name for other in found),
            f"--reward expects each reward once and functions of different names, got '{name}' twice in "
            f"'{flags.reward}'",
        )
        found.append(Reward(name, weight, rule))
    return tuple(found)


def found_rule(address: str, flags: RewardArguments, asked_by: str, names: Sequence[str] = RULE_NAMES) -> Rule:
    """Return the rule of that name, or the user's of that FILE.py:NAME; ThreestepError, with `names`, for others."""
    if is_address(address):
        return load_function(address, asked_by)
    if address not in RULE_NAMES:
        raise ThreestepError(
            f"{asked_by} expects {', '.join(names)} or a function as FILE.py:NAME, got '{address}'"
            f"{nearest_names(address, names)}"
        )
    return rule_named(address, flags)


def _parted(entry: str) -> tuple[str, float]:
    """'NAME:WEIGHT' as the two; 'NAME' and 'FILE.py:NAME' have weight 1."""
    address, colon, last = entry.rpartition(":")
    return (address, float(last)) if colon and _WEIGHT.fullmatch(last) else (entry, 1.0)
