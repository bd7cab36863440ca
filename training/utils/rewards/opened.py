"""Rules that are opened once a run is known, and may keep what they gave there: those of a service, for example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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
    """A rule (`rewards.table`) that is opened once the run is known.

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
