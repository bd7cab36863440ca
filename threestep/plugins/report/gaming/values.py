"""The values of a sample that are compared: the score that is trained on, and those that are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from training.utils.rewards.table import reward_name, split_weight

SCORE, CHECK = "reward", "check"  # as samples.jsonl has them


class Values(NamedTuple):
    """Names of a sample's values. trained: the parts of the score, if it has several. held_out: what nothing trains
    on, the rewards of weight 0 and the checker."""

    trained: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()


def label_of(name: str) -> str:
    """A value as people read it: `reward` is the score, `check` the checker, `reward/NAME` the reward NAME."""
    return {SCORE: "score", CHECK: "checker"}.get(name, name.removeprefix(f"{SCORE}/"))


def values_of(reward: str, checker: str | None) -> Values:
    """Return the values of a run. reward, checker: its flags."""
    return values_of_weights(
        {reward_name(entry): split_weight(entry.strip())[1] for entry in reward.split(",")}, checker
    )


def values_of_weights(weights: Mapping[str, float], checker: str | None) -> Values:
    """Return the values of rewards with these weights, by name. A checker that is one of them is no second value."""
    trained = [name for name, weight in weights.items() if weight]
    held_out = [f"{SCORE}/{name}" for name, weight in weights.items() if not weight]
    if checker is not None and reward_name(checker) not in weights:
        held_out.append(CHECK)
    parts = tuple(f"{SCORE}/{name}" for name in trained) if len(trained) > 1 else ()
    return Values(parts, tuple(held_out))
