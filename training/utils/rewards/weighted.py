"""The rewards of a run and their weights: `--reward gsm8k:1.0,model:0.5,my_file.py:my_reward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.user_files import is_address, load_function
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.asking.http_reward import http_reward
from training.utils.rewards.asking.judge import JudgeReward, judge_reward
from training.utils.rewards.asking.rule import AskedRule, asked_of
from training.utils.rewards.asking.verdicts import folder_of_replay
from training.utils.rewards.combination import Combination
from training.utils.rewards.completions import CompletionsRule, takes_completions
from training.utils.rewards.names.entries import is_http, is_judge, judge_name, reward_name, server_name, split_weight
from training.utils.rewards.table import RULES, RuleFlags

if TYPE_CHECKING:
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.rewards.asking.service import RunPlace
    from training.utils.rewards.calling.calling import Rule

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
    return any(isinstance(reward.rule, (CompletionsRule, AskedRule)) for reward in named)


def reads_ids(named: Sequence[Reward]) -> bool:
    """True if one of them is handed the tokens of prompts and responses."""
    return any(rule.reads_ids for rule in asked_of(reward.rule for reward in named))


def comparing(named: Sequence[Reward]) -> list[tuple[Reward, JudgeReward]]:
    """Return the rewards that compare the responses to a prompt with each other, and their judges."""
    return [(each, each.rule) for each in named if isinstance(each.rule, JudgeReward) and each.rule.compares]


def check_comparisons(named: Sequence[Reward], drawn: Mapping[str, int], mistakes: Mistakes) -> None:
    """Note rewards that compare responses where a prompt has one response. drawn: responses to each, by flag."""
    for reward, _ in comparing(named):
        for flag, count in drawn.items():
            mistakes.require(
                count > 1,
                f"--reward {reward.name} compares the responses to a prompt with each other, and {flag} gives one; "
                "draw several, or let the judge compare with the row's reference (against: ground_truth in its file)",
            )


def open_asked(rules: Iterable[Rule | None], replay: str | None, place: RunPlace) -> None:
    """Open those rules that ask a service, once the run is known. replay: --reward_replay."""
    for rule in asked_of(rules):
        rule.open(place if replay is None else place._replace(replay=folder_of_replay(replay)))


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


def rule_named(address: str, flags: RuleFlags, flag: str, names: Sequence[str] = (*RULES,)) -> Rule:
    """Return the rule of a name or of a FILE.py:NAME; otherwise ThreestepError, which lists `names`."""
    if is_address(address):
        function = load_function(address, flag)
        named = address.rpartition(":")[2]
        return CompletionsRule(named, function) if takes_completions(function) else function
    if is_judge(address):
        return _asked(judge_reward(address, judge_name(address), flag), flags)
    if is_http(address):
        return _asked(http_reward(address, server_name(address), flag), flags)
    if address not in RULES:
        raise ThreestepError(
            f"{flag} expects {', '.join(names)}, judge:FILE.yaml, http:URL or a function as FILE.py:NAME, got "
            f"'{address}'{nearest_names(address, names)}"
        )
    return RULES[address](flags)


def _asked(rule: AskedRule, flags: RuleFlags) -> AskedRule:
    """The rule, once it is checked that it can ask, unless it replays."""
    if flags.reward_replay is None:
        rule.check()
    else:
        folder_of_replay(flags.reward_replay)
    return rule
