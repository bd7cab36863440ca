"""The embedded task: small jobs on words and digits, written by a generator and checked exactly.

    Human: Put owl last: fox elk Assistant: fox elk owl

Registered as `embedded`. It lets all three steps run from random weights in minutes, with no file of a third
party. This module knows nothing of tokens, splits or models.

The six kinds of prompts are `KINDS`. Every answer is a list of items (words or digits) between spaces.

The checker: `check(prompt, response)` = 1 - d / max(items of the answer, items of the response), where d is
the least number of items to insert, delete or exchange that turns the response into the answer (Levenshtein's
distance on items). 1.0 is the answer itself, 0.0 has nothing of it in place. White space between items does
not count.

Responses are of graded quality, as in preference data that people write: the chosen one always has the
higher score, and is itself flawed in a share of the rows (`CHOSEN_FLAWS`); the rejected one is the chosen one with
more flaws (`MORE_FLAWS`). So a model that imitates the chosen responses also imitates their flaws, and a policy that is
trained on the preferences can do better than it. The flaws are those that a model makes: two items swapped, one lost,
one doubled, one wrong.

The same seed gives the same rows on every machine and Python version: of `random.Random` only `random()` is
used, whose sequence is guaranteed for an integer seed. Whether a prompt is held out for evaluation is decided by the
prompt alone, so training and held-out prompts differ even between two seeds.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset
from training.utils.run.errors import ThreestepError

TRAINING_ROWS = 20_000
HELD_OUT_ROWS = 400
HELD_OUT_SHARE = 16  # of so many prompts, one is held out

WORDS = tuple("ant bee cat cow dog elk fox gnu hen jay owl pig rat seal wolf yak".split())
DIGITS = tuple("123456789")
FEWEST_ITEMS, MOST_ITEMS = 3, 5
CHOSEN_FLAWS = (5, 4, 1)  # weights of a chosen response with no, one and two flaws
MORE_FLAWS = (2, 3, 2, 1)  # weights of a rejected response with one to four flaws more than the chosen one

Item = TypeVar("Item")


@dataclass(frozen=True)
class Example:
    """One row: the prompt, two responses of which `chosen` has the higher score, and the right answer."""

    kind: str
    prompt: str
    chosen: str
    rejected: str
    reference: str


@dataclass(frozen=True)
class Kind:
    """A kind of prompt: how its question is drawn, what it looks like, and what answers it."""

    name: str
    draw: Callable[[Draws], str]
    instruction: re.Pattern[str]  # all before the colon; its group, where it has one, is the operand
    answer: Callable[[str, list[str]], list[str]]  # (operand, items) -> items of the answer


class Draws:
    """Random choices that come out the same on every Python version."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (made by the seed, the same everywhere)

    def below(self, bound: int) -> int:
        """A whole number from 0 to bound - 1."""
        return int(self._random.random() * bound)

    def between(self, lowest: int, highest: int) -> int:
        """A whole number from `lowest` to `highest`, both included."""
        return lowest + self.below(highest - lowest + 1)

    def one_of(self, choices: Sequence[Item]) -> Item:
        """One of the choices, all equally likely."""
        return choices[self.below(len(choices))]

    def some_of(self, choices: Sequence[Item], count: int) -> list[Item]:
        """`count` different ones of the choices, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def weighted(self, weights: Sequence[float]) -> int:
        """An index into `weights`, as likely as its weight says."""
        point = self._random.random() * sum(weights)
        for index, weight in enumerate(weights):
            point -= weight
            if point < 0:
                return index
        return len(weights) - 1


def generate(
    seed: int, training_rows: int = TRAINING_ROWS, held_out_rows: int = HELD_OUT_ROWS
) -> dict[str, list[Example]]:
    """Return `training_rows` rows under "train" and `held_out_rows` under "eval"; no prompt comes twice."""
    draws = Draws(seed)
    rows: dict[str, list[Example]] = {"train": [], "eval": []}
    wanted = {"train": training_rows, "eval": held_out_rows}
    seen: set[str] = set()
    while any(len(rows[split]) < wanted[split] for split in rows):
        kind = draws.one_of(KINDS)
        prompt = f"Human: {kind.draw(draws)} Assistant:"
        split = "eval" if is_held_out(prompt) else "train"
        if prompt in seen or len(rows[split]) == wanted[split]:
            continue
        seen.add(prompt)
        rows[split].append(_example(draws, kind.name, prompt))
    return rows


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out rows, for every seed."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def solve(prompt: str) -> str:
    """Return the right answer to a prompt of this task; ThreestepError for any other prompt."""
    question = re.fullmatch(r"\s*Human: ([^:]*): (.*) Assistant:\s*", prompt)
    if question is not None:
        for kind in KINDS:
            instruction = kind.instruction.fullmatch(question[1])
            if instruction is not None:
                operand = instruction[1] if kind.instruction.groups else ""
                return " ".join(kind.answer(operand, question[2].split()))
    raise ThreestepError(
        f"expected a prompt of the embedded task ('Human: Sort: owl fox Assistant:', for instance), got {prompt!r}; "
        "the checker 'embedded' scores answers to --data_path embedded alone"
    )


def check(prompt: str, response: str) -> float:
    """Score a response to a prompt of this task from 0.0 to 1.0, as the module's docstring says."""
    return score(solve(prompt), response)


def score(answer: str, response: str) -> float:
    """Score a response against the right answer, as the module's docstring says."""
    expected, got = answer.split(), response.split()
    return 1.0 - _distance(expected, got) / max(len(expected), len(got), 1)


def _distance(first: list[str], second: list[str]) -> int:
    """Levenshtein's distance on items."""
    above = list(range(len(second) + 1))
    for row, item in enumerate(first, 1):
        current = [row]
        for column, other in enumerate(second, 1):
            current.append(min(above[column] + 1, current[-1] + 1, above[column - 1] + (item != other)))
        above = current
    return above[-1]


# The kinds.


def _draw_words(draws: Draws) -> list[str]:
    return draws.some_of(WORDS, draws.between(FEWEST_ITEMS, MOST_ITEMS))


def _draw_digits(draws: Draws) -> list[str]:
    return draws.some_of(DIGITS, draws.between(FEWEST_ITEMS, MOST_ITEMS))


def _draw_reverse(draws: Draws) -> str:
    return f"Reverse: {' '.join(_draw_words(draws))}"


def _draw_sort(draws: Draws) -> str:
    return f"Sort: {' '.join(_draw_words(draws))}"


def _draw_put_first(draws: Draws) -> str:
    operand, *words = _draw_words(draws)
    return f"Put {operand} first: {' '.join(words)}"


def _draw_put_last(draws: Draws) -> str:
    operand, *words = _draw_words(draws)
    return f"Put {operand} last: {' '.join(words)}"


def _draw_largest_first(draws: Draws) -> str:
    return f"Largest first: {' '.join(_draw_digits(draws))}"


def _draw_smallest_first(draws: Draws) -> str:
    return f"Smallest first: {' '.join(_draw_digits(draws))}"


KINDS = (
    Kind("reverse", _draw_reverse, re.compile("Reverse"), lambda operand, items: items[::-1]),
    Kind("sort", _draw_sort, re.compile("Sort"), lambda operand, items: sorted(items)),
    Kind("put first", _draw_put_first, re.compile(r"Put (\w+) first"), lambda operand, items: [operand, *items]),
    Kind("put last", _draw_put_last, re.compile(r"Put (\w+) last"), lambda operand, items: [*items, operand]),
    Kind(
        "largest first",
        _draw_largest_first,
        re.compile("Largest first"),
        lambda operand, items: sorted(items, key=int, reverse=True),
    ),
    Kind(
        "smallest first",
        _draw_smallest_first,
        re.compile("Smallest first"),
        lambda operand, items: sorted(items, key=int),
    ),
)


# Responses of graded quality.


def _example(draws: Draws, kind: str, prompt: str) -> Example:
    reference = solve(prompt)
    answer = reference.split()
    while True:  # flaws may undo each other
        better = _flawed(draws, answer, draws.weighted(CHOSEN_FLAWS))
        worse = _flawed(draws, better, 1 + draws.weighted(MORE_FLAWS))
        chosen, rejected = " ".join(better), " ".join(worse)
        if score(reference, chosen) > score(reference, rejected):
            return Example(kind, prompt, f" {chosen}", f" {rejected}", reference)


def _flawed(draws: Draws, items: Sequence[str], flaws: int) -> list[str]:
    """`items` with so many flaws, one after the other."""
    for _ in range(flaws):
        items = _FLAWS[draws.weighted(_FLAW_WEIGHTS)](draws, list(items))
    return list(items)


def _swap(draws: Draws, items: list[str]) -> list[str]:
    if len(items) > 1:
        at = draws.below(len(items) - 1)
        items[at], items[at + 1] = items[at + 1], items[at]
    return items


def _lose(draws: Draws, items: list[str]) -> list[str]:
    if len(items) > 1:
        items.pop(draws.below(len(items)))
    return items


def _double(draws: Draws, items: list[str]) -> list[str]:
    at = draws.below(len(items))
    items.insert(at, items[at])
    return items


def _confuse(draws: Draws, items: list[str]) -> list[str]:
    """One item becomes one of all that there are."""
    items[draws.below(len(items))] = draws.one_of(DIGITS if items[0] in DIGITS else WORDS)
    return items


def _repeat(draws: Draws, items: list[str]) -> list[str]:
    """One item becomes another one of the same response."""
    items[draws.below(len(items))] = draws.one_of(items)
    return items


_FLAWS = (_swap, _lose, _double, _confuse, _repeat)
_FLAW_WEIGHTS = (1, 2, 1, 2, 1)


class RowsOfSeed(Mapping[str, list[dict[str, str]]]):
    """Both splits, made (in most of a second) when one is first read: a run that finds its cache reads none."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def _made(self) -> dict[str, list[dict[str, str]]]:
        return {split: [asdict(row) for row in rows] for split, rows in generate(self._seed).items()}

    def __getitem__(self, split: str) -> list[dict[str, str]]:
        return self._made[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@register_dataset("embedded")
class EmbeddedDataset(PromptRawDataset):
    """The embedded task as a raw dataset; its rows are made from the run's seed."""

    def load_raw_datasets(self, dataset_name: str) -> Mapping[str, list[dict[str, str]]]:
        return RowsOfSeed(self.seed)

    def get_fingerprint(self) -> str:
        """The seed makes the rows; the code that makes them is in every fingerprint anyway."""
        return f"seed {self.seed}"

    def get_train_data(self) -> Sequence[Any]:
        return self.raw_datasets["train"]

    def get_eval_data(self) -> Sequence[Any]:
        return self.raw_datasets["eval"]

    def get_prompt(self, sample: Any) -> str:
        return sample["prompt"]

    def get_chosen(self, sample: Any) -> str:
        return sample["chosen"]

    def get_rejected(self, sample: Any) -> str:
        return sample["rejected"]

    def get_reference(self, sample: Any) -> str:
        """The right answer."""
        return sample["reference"]
