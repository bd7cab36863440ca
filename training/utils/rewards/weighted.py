"""The rewards of a run and their weights: `--reward gsm8k:1.0,model:0.5,my_file.py:my_reward`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.user_files import is_address, load_function, named_object
from training.utils.plugins.registry import owner_sentence
from training.utils.rewards.arguments import MEAN, MINIMUM, SUM, Combination, ScoringArguments
from training.utils.rewards.functions import CompletionsRule, checked_rule, takes_completions
from training.utils.rewards.table import (
    FORMS,
    RULES,
    OpenedRule,
    RuleFlags,
    kind_of,
    opened_of,
    reward_name,
    split_weight,
)

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.rewards.calling import Rule

MODEL, ENVIRONMENT = "model", "environment"


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
    """named: a response's score is their weighted sum, or another combination.
    columns: of the dataset; see `reward_columns`.
    texts_of: returns a rollout's responses as text, of a conversation the last turn; None if no rule reads them.
    turns_of: returns the texts of all turns of each response.
    media_of: returns the columns of a prompt's media for functions; None where no prompt has some.
    combination: makes one score of them.
    """

    named: tuple[Reward, ...]
    timeout_seconds: float
    columns: tuple[str, ...] = ()
    texts_of: Callable[[Rollout], Sequence[str]] | None = None
    turns_of: Callable[[Rollout], Sequence[Sequence[str]]] | None = None
    media_of: Callable[[PromptRow], dict[str, Any]] | None = None
    combination: Combination = Combination()


def reads_model(named: Sequence[Reward]) -> bool:
    """True if one of them is the reward model."""
    return any(reward.rule is None and reward.name == MODEL for reward in named)


def reads_messages(named: Sequence[Reward]) -> bool:
    """True if one of them is handed prompts of messages as they are."""
    opened = any(rule.reads_messages for rule in opened_of(reward.rule for reward in named))
    return opened or any(isinstance(reward.rule, CompletionsRule) for reward in named)


def reads_ids(named: Sequence[Reward]) -> bool:
    """True if one of them is handed the tokens of prompts and responses."""
    return any(rule.reads_ids for rule in opened_of(reward.rule for reward in named))


def comparing(named: Sequence[Reward]) -> list[tuple[Reward, OpenedRule]]:
    """Return the rewards that compare the responses to a prompt with each other, and their rules."""
    return [(each, each.rule) for each in named if isinstance(each.rule, OpenedRule) and each.rule.compares]


def check_comparisons(named: Sequence[Reward], drawn: Mapping[str, int], mistakes: Mistakes) -> None:
    """Note rewards that compare responses where a prompt has one response. drawn: responses to each, by flag."""
    for reward, _ in comparing(named):
        for flag, count in drawn.items():
            mistakes.require(
                count > 1,
                f"--reward {reward.name} compares the responses to a prompt with each other, but {flag} allows one; "
                "use several, or let the judge compare with the row's reference (against: ground_truth in its file)",
            )


def environment_weight(named: Sequence[Reward]) -> float:
    """The weight of the environments' rewards; 0 without any."""
    return sum(reward.weight for reward in named if reward.rule is None and reward.name == ENVIRONMENT)


MODEL_ALONE = Rewards((Reward(MODEL, 1.0, None),), ScoringArguments().reward_timeout)


def named_rewards(flags: ScoringArguments, mistakes: Mistakes, acts: bool = False) -> tuple[Reward, ...]:
    """Return the rewards of --reward; add unknown and duplicate names to `mistakes`. acts: there are environments."""
    rewards: list[Reward] = []
    for entry in flags.reward.split(","):
        address, weight = split_weight(entry.strip())
        name, rule = reward_name(entry), None
        if address not in (MODEL, ENVIRONMENT):
            rule = mistakes.note(rule_named, address, flags, "--reward", (MODEL, *RULES, ENVIRONMENT))
            if rule is None:
                continue
        mistakes.require(
            acts or address != ENVIRONMENT,
            "--reward environment needs an environment, but there is none; set --environment (step 3 only), or "
            "remove this reward",
        )
        mistakes.require(
            all(name != other.name for other in rewards),
            f"--reward expects each reward once and functions with different names, got '{name}' twice in "
            f"'{flags.reward}'",
        )
        rewards.append(Reward(name, weight, rule))
    return tuple(rewards)


def rule_named(address: str, flags: RuleFlags, flag: str, names: Sequence[str] = (*RULES,)) -> Rule:
    """Return the rule of a name or of a FILE.py:NAME; otherwise ThreestepError, which lists `names`."""
    if is_address(address):
        function = load_function(address, flag)
        named = address.rpartition(":")[2]
        return checked_rule(named, CompletionsRule(function) if takes_completions(function) else function)
    kind = kind_of(address)
    if kind is not None:
        rule: Rule = named_object(kind.make)(address, reward_name(address), flag)
        for opened in opened_of([rule]):
            opened.check(flags.reward_replay)
        return rule
    if address not in RULES:
        known = [*names, *FORMS]
        near = owner_sentence("rewards", address, by_beginning=True) or nearest_names(address, known)
        raise ThreestepError(f"{flag} expects {', '.join(known)} or a function as FILE.py:NAME, got '{address}'{near}")
    return RULES[address](flags)


def combined(summands_BK: torch.Tensor, applies_BK: torch.Tensor, combination: Combination) -> torch.Tensor:
    """Return [B], one score of several rewards times their weights: their sum, or that of an ensemble, which distrusts
    what its members disagree about; 0 where none applies.

    Coste et al. 2023 ("Reward Model Ensembles Help Mitigate Overoptimization"): mean, worst case (`minimum`), and
    uncertainty-weighted (theirs subtracts the variance times a coefficient; here it is the deviation, in units of
    rewards). B responses, K rewards. applies_BK: bool, those that count.
    """
    kept_BK = summands_BK.where(applies_BK, 0.0)
    if combination.kind == SUM:
        return kept_BK.sum(dim=1)
    count_B = applies_BK.sum(dim=1)
    if combination.kind == MINIMUM:
        least_B = summands_BK.where(applies_BK, math.inf).amin(dim=1)
        return least_B.where(count_B > 0, 0.0)
    mean_B = kept_BK.sum(dim=1) / count_B.clamp(min=1)
    if combination.kind == MEAN:
        return mean_B
    off_BK = (summands_BK - mean_B[:, None]).where(applies_BK, 0.0)
    return mean_B - combination.deviations * (off_BK.square().sum(dim=1) / count_B.clamp(min=1)).sqrt()
