"""The table of rules by name, and entries of --reward as text: `gsm8k:1.0`, `FILE.py:NAME`, and what plugins take, such
as `http:URL`. Cheap to import: `--help` lists the names.

A rule is `fn(prompts, responses, **columns) -> list[float]`: texts in, one number per response out. Each column is a
list of the same length: `ground_truth`, `data_source` and any other column of the dataset's rows (see `calling`). An
`OpenedRule` is opened once a run is known, and may keep what it gave there: that of a service, for example."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added
from training.utils.rewards.rules import (
    exact_match_reward,
    format_reward,
    gsm8k_reward,
    length_rule,
    math_rule,
    regex_rule,
)

if TYPE_CHECKING:
    from training.utils.plugins.plugin import RewardEntry
    from training.utils.rewards.calling import Rule


class RuleFlags(Protocol):
    """The flags that rules are made from."""

    reward_regex: str | None
    reward_length_characters: int | None
    reward_replay: str | None


# Each makes its rule; ThreestepError if the rule's flag or package is missing.
RULES: dict[str, Callable[[RuleFlags], Rule]] = {
    "gsm8k": lambda flags: gsm8k_reward,
    "exact_match": lambda flags: exact_match_reward,
    "format": lambda flags: format_reward,
    "regex": lambda flags: regex_rule(flags.reward_regex),
    "length": lambda flags: length_rule(flags.reward_length_characters),
    "math": lambda flags: math_rule(),
}


# Entries of plugins, by an address or, such as http:, its beginning.
KINDS: dict[str, RewardEntry] = added("rewards", ())
FORMS = {kind.form: kind.note for kind in KINDS.values() if kind.form}  # as messages and `--help` show them
# Of http://host:8001 the last number is a port.
_ENDS_IN_PORT = re.compile(r"(?:http:)?https?://(?:\[[^\]]*\]|[^/:]*):\d+")
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def split_weight(entry: str) -> tuple[str, float]:
    """Split 'NAME:WEIGHT'; 'NAME' and 'FILE.py:NAME' have weight 1."""
    address, colon, last = entry.rpartition(":")
    has_weight = colon and _WEIGHT.fullmatch(last) and not _ENDS_IN_PORT.fullmatch(entry)
    return (address, float(last)) if has_weight else (entry, 1.0)


def reward_name(entry: str) -> str:
    """The name of an entry of --reward as it is logged: without its file, its address and its weight."""
    address = split_weight(entry.strip())[0]
    kind = kind_of(address)
    return address.rpartition(":")[2] if kind is None else str(named_object(kind.name)(address))


def kind_of(address: str) -> RewardEntry | None:
    """Return the entry of a plugin for an address, by its name or its beginning; None where there is none."""
    by_beginning = (kind for name, kind in KINDS.items() if not name.isidentifier() and address.startswith(name))
    return KINDS.get(address) or next(by_beginning, None)


GROUPS = "judged_together"  # a column: responses with equal entries are compared; without it, with equal prompts


class RunPlace(NamedTuple):
    """folder: of the run; None where nothing is kept. rank: of those that score. tokenizer: a digest of that of the
    responses. replay: the run whose numbers are given again, as --reward_replay names it."""

    folder: Path | None = None
    rank: int = 0
    world_size: int = 1
    tokenizer: str = ""
    replay: Path | None = None


class OpenedRule(ABC):
    """A rule that is opened once the run is known.

    reads_messages: it is handed prompts of messages as they are.
    reads_ids: it is handed the tokens of prompts and responses.
    compares: it compares the responses to a prompt with each other.
    reads_reference: it needs a row's reference.
    """

    reads_messages: ClassVar[bool] = False
    reads_ids: ClassVar[bool] = False

    @property
    def compares(self) -> bool:
        return False

    @property
    def reads_reference(self) -> bool:
        return False

    @abstractmethod
    def check(self, replay: str | None) -> None:
        """ThreestepError for what is missing to score, or to give the numbers of the run `replay` again."""

    @abstractmethod
    def open(self, place: RunPlace) -> None:
        """Begin to score in a run."""

    @abstractmethod
    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> Any:
        """Return a number for each response, as any rule."""

    def compare(self, prompts: list[str], responses: list[str], *, others: list[str], **columns: Any) -> list[float]:
        """Return the share of wins of each response over another to the same prompt; of a rule that compares."""
        raise NotImplementedError(f"{type(self).__name__} compares nothing")


def opened_of(rules: Iterable[Any]) -> list[OpenedRule]:
    """Return those rules that are opened."""
    return [rule for rule in rules if isinstance(rule, OpenedRule)]


def open_rules(rules: Iterable[Any], replay: str | None, place: RunPlace) -> None:
    """Open those rules that want it. replay: --reward_replay."""
    for rule in opened_of(rules):
        rule.open(place if replay is None else place._replace(replay=Path(replay)))
