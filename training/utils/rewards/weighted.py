"""The rewards of a run and their weights: `--reward gsm8k:1.0,model:0.5,my_file.py:my_reward`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.user_files import is_address, load_function
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.completions import CompletionsRule, takes_completions
from training.utils.rewards.table import RULES, RuleFlags

if TYPE_CHECKING:
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.rewards.calling.calling import Rule

MODEL, ENVIRONMENT = "model", "environment"
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Reward:
    """name: as it is logged.
    rule: None for the reward model, and for the sum of an environment's rewards over a conversation's turns.
    """

    name: str
    weight: float
    rule: Rule | None


@dataclass(frozen=True)
class Rewards:
    """named: a response's score is their weighted sum.
    columns: of the dataset; see `reward_columns`.
    texts_of: returns a rollout's responses as text, of a conversation the last turn; None if no rule reads them.
    turns_of: returns the texts of all turns of each response.
    media_of: returns the columns of a prompt's media for functions; None where no prompt has some.
    """

    named: tuple[Reward, ...]
    timeout_seconds: float
    columns: tuple[str, ...] = ()
    texts_of: Callable[[Rollout], Sequence[str]] | None = None
    turns_of: Callable[[Rollout], Sequence[Sequence[str]]] | None = None
    media_of: Callable[[PromptRow], dict[str, Any]] | None = None


def reads_model(named: Sequence[Reward]) -> bool:
    """True if one of them is the reward model."""
    return any(reward.rule is None and reward.name == MODEL for reward in named)


def reads_messages(named: Sequence[Reward]) -> bool:
    """True if one of them is handed prompts of messages as they are."""
    return any(isinstance(reward.rule, CompletionsRule) for reward in named)


def environment_weight(named: Sequence[Reward]) -> float:
    """The weight of the environments' rewards; 0 without any."""
    return sum(reward.weight for reward in named if reward.rule is None and reward.name == ENVIRONMENT)


MODEL_ALONE = Rewards((Reward(MODEL, 1.0, None),), ScoringArguments().reward_timeout)


def named_rewards(flags: ScoringArguments, mistakes: Mistakes, acts: bool = False) -> tuple[Reward, ...]:
    """Return the rewards of --reward; add unknown and duplicate names to `mistakes`. acts: there are environments."""
    rewards: list[Reward] = []
    for entry in flags.reward.split(","):
        address, weight = _split_weight(entry.strip())
        name, rule = reward_name(entry), None
        if address not in (MODEL, ENVIRONMENT):
            rule = mistakes.note(rule_named, address, flags, "--reward", (MODEL, *RULES, ENVIRONMENT))
            if rule is None:
                continue
        mistakes.require(
            acts or address != ENVIRONMENT,
            "--reward environment is what an environment gives the turns of a conversation, and there is none; give "
            "--environment, in step 3, or leave it out",
        )
        mistakes.require(
            all(name != other.name for other in rewards),
            f"--reward expects each reward once and functions of different names, got '{name}' twice in "
            f"'{flags.reward}'",
        )
        rewards.append(Reward(name, weight, rule))
    return tuple(rewards)


def reward_name(entry: str) -> str:
    """The name of an entry of --reward as it is logged: without its file and its weight."""
    return _split_weight(entry.strip())[0].rpartition(":")[2]


def rule_named(address: str, flags: RuleFlags, flag: str, names: Sequence[str] = (*RULES,)) -> Rule:
    """Return the rule of a name or of a FILE.py:NAME; otherwise ThreestepError, which lists `names`."""
    if is_address(address):
        function = load_function(address, flag)
        named = address.rpartition(":")[2]
        return CompletionsRule(named, function) if takes_completions(function) else function
    if address not in RULES:
        raise ThreestepError(
            f"{flag} expects {', '.join(names)} or a function as FILE.py:NAME, got '{address}'"
            f"{nearest_names(address, names)}"
        )
    return RULES[address](flags)


def _split_weight(entry: str) -> tuple[str, float]:
    """Split 'NAME:WEIGHT'; 'NAME' and 'FILE.py:NAME' have weight 1."""
    address, colon, last = entry.rpartition(":")
    return (address, float(last)) if colon and _WEIGHT.fullmatch(last) else (entry, 1.0)
