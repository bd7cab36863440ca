"""The check of an environment: conversations by scripts, and what they show, as findings."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.environments.conversations import (
    RIGHT,
    SCRIPTS,
    PlayedConversation,
    answer_of,
    converse,
    opening_of,
    side_by_side,
)
from training.utils.base.seeds import derived_seed

if TYPE_CHECKING:
    from threestep.plugins.environments.loading import Environments
    from threestep.plugins.environments.rows import Row

GOOD, WRONG, UNDECIDED = "good", "wrong", "undecided"
_SHORTEST_ANSWER = 2  # characters; a shorter one stands in any text by chance


class EnvironmentFinding(NamedTuple):
    """state: GOOD, WRONG or UNDECIDED."""

    name: str
    state: str
    sentence: str


class ScriptFigures(NamedTuple):
    """All rows' conversations by one script: how many, their turns, how many were done, the smallest and largest
    reward, the slowest step, and the first failure."""

    script: str
    conversations: int
    turns: tuple[int, int]
    done: int
    rewards: tuple[float, float]
    slowest: float
    problem: str


@dataclass(frozen=True)
class Check:
    """Settings of a check. reward_range: in which the reward of a conversation must lie; None: any."""

    rows: Sequence[Row]
    seed: int
    turns: int
    reward_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Checked:
    """example: the longest conversation that was played, with the row that opened it."""

    findings: tuple[EnvironmentFinding, ...]
    scripts: tuple[ScriptFigures, ...]
    example: tuple[Row, PlayedConversation]

    @property
    def is_good(self) -> bool:
        return all(finding.state != WRONG for finding in self.findings)


def check(environments: Environments, asked: Check) -> Checked:
    """Play all scripts on all rows, each of them twice, and judge. ThreestepError if no row opens the environment."""
    played: list[tuple[Row, PlayedConversation, PlayedConversation]] = []
    others: list[tuple[PlayedConversation, PlayedConversation]] = []
    together: list[tuple[PlayedConversation, PlayedConversation]] = []
    for place, row in enumerate(asked.rows):
        seed = derived_seed(asked.seed, "check", place)
        first = [converse(environments, row, script, seed, turns=asked.turns) for script in SCRIPTS]
        again = [converse(environments, row, script, seed, turns=asked.turns) for script in SCRIPTS]
        played += [(row, *pair) for pair in zip(first, again, strict=True)]
        others.append((first[0], opening_of(environments, row, seed + 1)))
        beside = side_by_side(environments, row, list(SCRIPTS), seed, turns=asked.turns)
        together += zip(first, beside, strict=True)
    had = [(row, first) for row, first, _ in played if first.opening is None or first.replies]
    opens = any(first.opening is not None for _, first in had)
    findings = (
        (_begins(had),)
        if not opens
        else (
            _begins(had),
            _begins_alike(others),
            _repeats(played),
            _keeps_apart(together),
            _rewards(had, asked.reward_range),
            _nonsense(had),
            _pays(had),
            _leaks(had),
            _lengths(had, asked.turns),
        )
    )
    scripts = tuple(_figures(script, [each for _, each in had if each.script == script]) for script in SCRIPTS)
    example = max(had, key=lambda each: (not each[1].problems, len(each[1].replies)))
    return Checked(findings, tuple(each for each in scripts if each.conversations), example)


def _begins(had: Sequence[tuple[Row, PlayedConversation]]) -> EnvironmentFinding:
    failed = [each for _, each in had if each.opening is None]
    if failed:
        return EnvironmentFinding("reset", WRONG, failed[0].problems[0])
    tools = max(len(each.opening.tools or ()) for _, each in had if each.opening is not None)
    return EnvironmentFinding("reset", GOOD, f"opens every row, with {tools} tool{'s' * (tools != 1)}")


def _begins_alike(others: Sequence[tuple[PlayedConversation, PlayedConversation]]) -> EnvironmentFinding:
    name = "beginning"
    for place, (first, other) in enumerate(others):
        if first.opening != other.opening:
            return EnvironmentFinding(
                name, WRONG,
                f"row {place} begins differently with another seed: the samples of a prompt are compared, so they "
                "must begin alike; let the row decide the beginning, and the seed what follows",
            )  # fmt: skip
    return EnvironmentFinding(name, GOOD, "does not depend on the seed")


def _repeats(played: Sequence[tuple[Row, PlayedConversation, PlayedConversation]]) -> EnvironmentFinding:
    for _, first, again in played:
        if first.told != again.told:
            return EnvironmentFinding(
                "repeats", WRONG,
                f"a conversation by '{first.script}' went differently the second time, with the same row and "
                f"seed{_difference(first, again)}; draw what is random from the seed of reset(row, seed), or a "
                "resumed run trains on other conversations",
            )  # fmt: skip
    return EnvironmentFinding(
        "repeats", GOOD, f"{len(played)} conversations repeated exactly with the same row and seed"
    )


def _keeps_apart(together: Sequence[tuple[PlayedConversation, PlayedConversation]]) -> EnvironmentFinding:
    for alone, beside in together:
        if alone.told != beside.told:
            return EnvironmentFinding(
                "apart", WRONG,
                f"a conversation by '{alone.script}' went differently beside others{_difference(alone, beside)}; "
                "keep what a conversation remembers in its own instance, not in the class or the module",
            )  # fmt: skip
    return EnvironmentFinding("apart", GOOD, "conversations side by side run as each does alone")


def _difference(first: PlayedConversation, other: PlayedConversation) -> str:
    if first.opening != other.opening:
        return " (it began differently)"
    for place, (one, two) in enumerate(zip(first.replies, other.replies, strict=False), start=1):
        if one.messages != two.messages:
            return f" (step {place} returned other messages)"
        if one.reward != two.reward:
            return f" (step {place} paid {one.reward:g} and then {two.reward:g})"
    return " (it took a different number of steps)" if len(first.replies) != len(other.replies) else ""


def _rewards(had: Sequence[tuple[Row, PlayedConversation]], wanted: tuple[float, float] | None) -> EnvironmentFinding:
    name = "rewards"
    values = [each.reward for _, each in had if each.replies]
    if not values:
        return EnvironmentFinding(name, UNDECIDED, "no conversation had a turn")
    low, high = min(values), max(values)
    seen = f"from {low:g} to {high:g} per conversation, {len(set(values))} different values"
    if wanted is not None and not (wanted[0] <= low and high <= wanted[1]):
        return EnvironmentFinding(name, WRONG, f"{seen}; expected from {wanted[0]:g} to {wanted[1]:g}")
    if low == high:
        return EnvironmentFinding(
            name,
            UNDECIDED,
            f"{seen}: the scripts cannot tell what earns a reward; try it with `threestep inspect env try`",
        )
    return EnvironmentFinding(name, GOOD if wanted is not None else UNDECIDED, seen + _unasked(wanted))


def _unasked(wanted: tuple[float, float] | None) -> str:
    return "" if wanted is not None else "; pass the expected range with --reward_range"


def _nonsense(had: Sequence[tuple[Row, PlayedConversation]]) -> EnvironmentFinding:
    failed = [each for _, each in had if each.opening is not None and each.problems]
    if failed:
        names = ", ".join(f"'{script}'" for script in dict.fromkeys(each.script for each in failed))
        return EnvironmentFinding("nonsense", WRONG, f"fails at {names}: {failed[0].problems[0]}")
    return EnvironmentFinding("nonsense", GOOD, f"handles all {len(SCRIPTS) - 1} kinds of nonsense without a failure")


def _pays(had: Sequence[tuple[Row, PlayedConversation]]) -> EnvironmentFinding:
    """Nonsense that pays as much as the right answer."""
    name = "pay for nonsense"
    right = [each.reward for _, each in had if each.script == RIGHT and each.replies]
    others = [each for _, each in had if each.script != RIGHT and each.replies]
    if not others:
        return EnvironmentFinding(name, UNDECIDED, "no conversation had a turn")
    best = max(others, key=lambda each: each.reward)
    paid = f"the highest reward for nonsense is {best.reward:g}, for '{best.script}'"
    if not right:
        return EnvironmentFinding(name, UNDECIDED, f"{paid}; no row has a ground truth to compare with")
    if max(right) <= min(each.reward for each in others):
        return EnvironmentFinding(
            name, UNDECIDED, f"{paid}; the reward for the ground truth as a plain message is {max(right):g}, no more"
        )
    state = WRONG if best.reward >= max(right) else GOOD
    return EnvironmentFinding(name, state, f"{paid}; the reward for the ground truth is {max(right):g}")


def _leaks(had: Sequence[tuple[Row, PlayedConversation]]) -> EnvironmentFinding:
    """The ground truth in what the model reads before the conversation is over."""
    name = "leaks"
    known = [(row, each) for row, each in had if each.script != RIGHT and _searched(row) and each.opening is not None]
    if not known:
        return EnvironmentFinding(
            name, UNDECIDED, f"no row has a ground truth of {_SHORTEST_ANSWER} characters or more to look for"
        )
    places: Counter[str] = Counter()
    for row, each in known:
        places.update(_places_of(str(answer_of(row)), each))
    if places:
        place, count = places.most_common(1)[0]
        return EnvironmentFinding(
            name, WRONG, f"the ground truth appears in {place}, in {count} of {len(known)} conversations"
        )
    return EnvironmentFinding(
        name, GOOD, f"the ground truth appears in nothing that was said in {len(known)} conversations"
    )


def _searched(row: Mapping[str, Any]) -> bool:
    return len(answer_of(row) or "") >= _SHORTEST_ANSWER


def _places_of(answer: str, conversation: PlayedConversation) -> Iterator[str]:
    """The places that the model reads before it is paid and that have the answer; none for what it said itself."""
    found = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)")
    opening = conversation.opening
    assert opening is not None
    if any(found.search(str(message.get("content") or "")) for message in opening.messages):
        yield "the opening"
    if found.search(str(opening.tools or "")):
        yield "the tools"
    for reply in conversation.replies:
        if not reply.done and any(found.search(str(message["content"])) for message in reply.messages):
            yield f"a reply to '{conversation.script}'"
            return


def _lengths(had: Sequence[tuple[Row, PlayedConversation]], most: int) -> EnvironmentFinding:
    turns = [len(each.replies) for _, each in had if each.replies]
    steps = [seconds for _, each in had for seconds in each.seconds[1:]]
    resets = [each.seconds[0] for _, each in had if each.seconds]
    if not turns:
        return EnvironmentFinding("length", UNDECIDED, "no conversation had a turn")
    over = sum(each.is_done for _, each in had)
    return EnvironmentFinding(
        "length", GOOD,
        f"{min(turns)} to {max(turns)} turns (median {statistics.median(turns):g}), {over} of {len(had)} finished "
        f"within {most}; reset takes up to {in_seconds(max(resets))}, a step {in_seconds(statistics.median(steps))} "
        f"(median) and up to {in_seconds(max(steps))}",
    )  # fmt: skip


def in_seconds(seconds: float) -> str:
    """A time in a unit that fits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _figures(script: str, conversations: Sequence[PlayedConversation]) -> ScriptFigures:
    turns = [len(each.replies) for each in conversations] or [0]
    rewards = [each.reward for each in conversations if each.replies] or [math.nan]
    steps = [seconds for each in conversations for seconds in each.seconds[1:]]
    problems = [problem for each in conversations for problem in each.problems]
    return ScriptFigures(
        script, len(conversations), (min(turns), max(turns)), sum(each.is_done for each in conversations),
        (min(rewards), max(rewards)), max(steps, default=0.0), problems[0] if problems else "",
    )  # fmt: skip
