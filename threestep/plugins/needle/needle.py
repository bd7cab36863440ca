"""The needle: facts far back in a long row of words, and a question about one of them, made by code.

    Human: yak fox The number of owl is 4 7. elk ... pig What is the number of owl? Assistant: 4 7

Registered as `needle`; serves `--data_path needle,words=16000,facts=4,rows=500`. It shows whether a model that is
trained or drawn at some length reads all of it. Knows nothing of tokens, splits or models.

The words between are those of the facts' names. The fact that is asked for stands in the first half of the row, so
where two ranks share a row, question and fact are on different ranks; others stand anywhere. The answer is exact:
`--reward exact_match` compares a response with it. The rejected response is the number of another fact, or any other.

A row follows from the seed, the settings and its index alone, and is made when it is read: rows take no memory. The
same seed gives the same rows on every machine and Python version: see `embedded.task.Draws`. The fact that is asked for
alone decides whether a row is held out for evaluation, so no held-out fact is ever learnt.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, overload

from threestep.plugins.embedded.task import DIGITS, WORDS, Draws
from training.utils.base.errors import Mistakes, nearest_names
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset

# Another whenever the same sources make other rows (see `fingerprint`).
ROWS_VERSION = "1"
HELD_OUT_ROWS = 64
HELD_OUT_SHARE = 16  # one fact in 16 is held out


@dataclass(frozen=True)
class NeedleSettings:
    """words: of a row beside its facts. facts: of a row, each of another name. rows: to train on."""

    words: int = 1000
    facts: int = 1
    rows: int = 2000


class Fact(NamedTuple):
    """number: digits with spaces between."""

    name: str
    number: str

    @property
    def is_held_out(self) -> bool:
        """True if rows that ask for it are held out, for every seed."""
        return zlib.crc32(repr(tuple(self)).encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class NeedleRow:
    """One row: the prompt, the right answer and a wrong one."""

    prompt: str
    answer: str
    wrong: str


def parse_settings(name: str) -> NeedleSettings:
    """Read the settings behind `needle`; ThreestepError for unknown ones, and for values that are no whole numbers
    above 0 or more facts than names."""
    known = asdict(NeedleSettings())
    mistakes = Mistakes()
    for each in name.split(",")[1:]:
        setting, _, value = each.partition("=")
        if setting not in known:
            near = nearest_names(setting, known)
            mistakes.add(
                f"--data_path '{name}': expected only {', '.join(known)} after the name, got '{setting}'{near}"
            )
        elif not re.fullmatch("[1-9][0-9]*", value) or (setting == "facts" and int(value) > len(WORDS)):
            most = f"1 to {len(WORDS)}" if setting == "facts" else "1 or more"
            mistakes.add(f"--data_path '{name}': {setting} expects {most}, got '{value}'")
        else:
            known[setting] = int(value)
    mistakes.raise_if_any()
    return NeedleSettings(**known)


def make_row(seed: int, index: int, settings: NeedleSettings, held_out: bool = False) -> NeedleRow:
    """Return the row of that index, of the training rows or of those held out."""
    draws = Draws((seed << 40) + 2 * index + held_out)
    names = draws.some_of(WORDS, settings.facts)
    asked = _fact(draws, names[0])
    while asked.is_held_out != held_out:
        asked = _fact(draws, draws.one_of([name for name in WORDS if name not in names[1:]]))
    others = [_fact(draws, name) for name in names[1:]]
    words = [draws.one_of(WORDS) for _ in range(settings.words)]
    facts = [(draws.below(settings.words // 2 + 1), asked)]
    facts += [(draws.below(settings.words + 1), fact) for fact in others]
    for place, fact in sorted(facts, reverse=True):
        words.insert(place, f"The number of {fact.name} is {fact.number}.")
    wrong = next((fact.number for fact in others if fact.number != asked.number), asked.number)
    while wrong == asked.number:
        wrong = _fact(draws, asked.name).number
    question = f"What is the number of {asked.name}?"
    return NeedleRow(f"Human: {' '.join(words)} {question} Assistant:", f" {asked.number}", f" {wrong}")


def _fact(draws: Draws, name: str) -> Fact:
    return Fact(name, f"{draws.one_of(DIGITS)} {draws.one_of(DIGITS)}")


class NeedleRows(Sequence[NeedleRow]):
    """Rows that are made when they are read."""

    def __init__(self, seed: int, settings: NeedleSettings, held_out: bool) -> None:
        self._seed, self._settings, self._held_out = seed, settings, held_out

    def __len__(self) -> int:
        return HELD_OUT_ROWS if self._held_out else self._settings.rows

    @overload
    def __getitem__(self, index: int) -> NeedleRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[NeedleRow]: ...
    def __getitem__(self, index: int | slice) -> NeedleRow | list[NeedleRow]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        return make_row(self._seed, places, self._settings, self._held_out)


@register_dataset("needle")
class NeedleDataset(PromptRawDataset):
    """The needle as a raw dataset; its rows are made from the run's seed and the settings behind its name."""

    takes_settings = True

    def load_raw_datasets(self, dataset_name: str) -> None:
        """Read the settings; rows are made when they are read."""
        self._settings = parse_settings(dataset_name)

    def get_fingerprint(self) -> str:
        """The rows follow from the seed, the settings and this file, which is in every fingerprint
        (`code_of_class`)."""
        return f"seed {self.seed} {self._settings}"

    def get_train_data(self) -> NeedleRows:
        return NeedleRows(self.seed, self._settings, held_out=False)

    def get_eval_data(self) -> NeedleRows:
        return NeedleRows(self.seed, self._settings, held_out=True)

    def get_prompt(self, sample: NeedleRow) -> str:
        return sample.prompt

    def get_chosen(self, sample: NeedleRow) -> str:
        return sample.answer

    def get_rejected(self, sample: NeedleRow) -> str:
        return sample.wrong

    def get_reference(self, sample: NeedleRow) -> str:
        """The right answer."""
        return sample.answer.strip()
