"""The embedded task: small jobs on words and digits, written by a generator and checked exactly.

    Human: Put owl last: fox elk Assistant: fox elk owl

Registered as `embedded`. It lets all three steps run from random weights in minutes, without third-party files.
Knows nothing of tokens, splits or models.

The six kinds of prompts are `KINDS`. Every answer is a list of items (words or digits) separated by spaces.

The checker: `check(prompt, response)` = 1 - d / max(items of the answer, items of the response), where d is the
Levenshtein distance on items: the fewest insertions, deletions and substitutions that turn the response into the
answer. 1.0 is the answer itself, at 0.0 nothing is in place. White space between items does not count.

Responses are of graded quality, as in human preference data: the chosen one always has the higher score, and is itself
flawed in a share of the rows (`CHOSEN_FLAWS`); the rejected one is the chosen one with more flaws (`MORE_FLAWS`). So a
model that imitates the chosen responses also imitates their flaws, and a policy trained on the preferences can do
better. The flaws are those of models: two items swapped, one lost, one doubled, one wrong.

The same seed gives the same rows on every machine and Python version: only `random()` of `random.Random` is used, whose
sequence is guaranteed for an integer seed. The prompt alone decides whether it is held out for evaluation, so training
and held-out prompts differ even between seeds.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from training.utils.base.errors import ThreestepError
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset

# Of the cache's fingerprint: change it where the same seed gives other rows.
ROWS_VERSION = "4361694cce6803f8e36a279306de1b1f23deb8061f79271ea14eabf84cbdc05f"
TRAINING_ROWS = 20_000
HELD_OUT_ROWS = 400
HELD_OUT_SHARE = 16  # one prompt in 16 is held out

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
    """A kind of prompt.

    instruction: all before the colon; {} stands for its operand, one of the items drawn.
    answer: (operand, items) -> items of the answer.
    """

    name: str
    instruction: str
    vocabulary: tuple[str, ...]
    answer: Callable[[str, list[str]], list[str]]

    def draw(self, draws: Draws) -> str:
        """A question: the instruction, a colon and the items."""
        items = draws.some_of(self.vocabulary, FEWEST_ITEMS + draws.below(MOST_ITEMS - FEWEST_ITEMS + 1))
        operands = items[: self.instruction.count("{}")]
        return f"{self.instruction.format(*operands)}: {' '.join(items[len(operands) :])}"

    def operand(self, instruction: str) -> str | None:
        """The operand of an instruction of this kind, "" where the kind has none; None for another kind."""
        match = re.fullmatch(self.instruction.replace("{}", r"(\w+)"), instruction)
        return None if match is None else "".join(match.groups())


class Draws:
    """Random choices that come out the same on every Python version."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (made by the seed, the same everywhere)

    def below(self, bound: int) -> int:
        """A whole number from 0 to bound - 1."""
        return int(self._random.random() * bound)

    def one_of(self, choices: Sequence[Item]) -> Item:
        """One of the choices, all equally likely."""
        return choices[self.below(len(choices))]

    def some_of(self, choices: Sequence[Item], count: int) -> list[Item]:
        """`count` different choices, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def weighted(self, weights: Sequence[float]) -> int:
        """An index into `weights`, in proportion to its weight."""
        point = self._random.random() * sum(weights)
        for index, weight in enumerate(weights):
            point -= weight
            if point < 0:
                return index
        return len(weights) - 1


def generate(
    seed: int, training_rows: int = TRAINING_ROWS, held_out_rows: int = HELD_OUT_ROWS
) -> dict[str, list[Example]]:
    """Return `training_rows` rows under "train" and `held_out_rows` under "eval"; no prompt occurs twice."""
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
    """True if a prompt belongs to the held-out rows, for every seed."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def solve(prompt: str) -> str:
    """Return the right answer to a prompt of this task; ThreestepError for any other prompt."""
    question = re.fullmatch(r"\s*Human: ([^:]*): (.*) Assistant:\s*", prompt)
    if question is not None:
        for kind in KINDS:
            operand = kind.operand(question[1])
            if operand is not None:
                return " ".join(kind.answer(operand, question[2].split()))
    raise ThreestepError(
        f"expected a prompt of the embedded task (such as 'Human: Sort: owl fox Assistant:'), got {prompt!r}; the "
        "checker 'embedded' scores only answers to --data_path embedded"
    )


def check(prompt: str, response: str) -> float:
    """Score a response to a prompt of this task from 0.0 to 1.0, as the module's docstring defines."""
    return score(solve(prompt), response)


def score(answer: str, response: str) -> float:
    """Score a response against the right answer, as the module's docstring defines."""
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


KINDS = (
    Kind("reverse", "Reverse", WORDS, lambda operand, items: items[::-1]),
    Kind("sort", "Sort", WORDS, lambda operand, items: sorted(items)),
    Kind("put first", "Put {} first", WORDS, lambda operand, items: [operand, *items]),
    Kind("put last", "Put {} last", WORDS, lambda operand, items: [*items, operand]),
    Kind("largest first", "Largest first", DIGITS, lambda operand, items: sorted(items, key=int, reverse=True)),
    Kind("smallest first", "Smallest first", DIGITS, lambda operand, items: sorted(items, key=int)),
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
    """`items` with that number of flaws, one after the other."""
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
    """One item becomes any item of its vocabulary."""
    items[draws.below(len(items))] = draws.one_of(DIGITS if items[0] in DIGITS else WORDS)
    return items


def _repeat(draws: Draws, items: list[str]) -> list[str]:
    """One item becomes a copy of one in the same response."""
    items[draws.below(len(items))] = draws.one_of(items)
    return items


_FLAWS = (_swap, _lose, _double, _confuse, _repeat)
_FLAW_WEIGHTS = (1, 2, 1, 2, 1)


@register_dataset("embedded")
class EmbeddedDataset(PromptRawDataset):
    """The embedded task as a raw dataset; its rows are made from the run's seed."""

    def load_raw_datasets(self, dataset_name: str) -> None:
        """Rows are generated (in most of a second) when first read: a run that finds its cache reads none."""

    @cached_property
    def _rows(self) -> dict[str, list[Example]]:
        return generate(self.seed)

    def get_fingerprint(self) -> str:
        """The rows follow from the seed and `ROWS_VERSION`, which is in every fingerprint (`code_of_class`)."""
        return f"seed {self.seed}"

    def get_train_data(self) -> Sequence[Example]:
        return self._rows["train"]

    def get_eval_data(self) -> Sequence[Example]:
        return self._rows["eval"]

    def get_prompt(self, sample: Example) -> str:
        return sample.prompt

    def get_chosen(self, sample: Example) -> str:
        return sample.chosen

    def get_rejected(self, sample: Example) -> str:
        return sample.rejected

    def get_reference(self, sample: Example) -> str:
        """The right answer."""
        return sample.reference
