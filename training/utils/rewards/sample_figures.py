"""Figures of scored samples, several of which may answer one prompt: by prompt, by data source, by value. Serves
evaluations.

A sample is a mapping: `prompt_index`, `response`, `last_turn` of a conversation, the prompt's `columns`, and values by
name: `reward`, `reward/NAME` of each summand, `reward/NAME/KEY` of what it also returns, `check` and `check/KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.rewards.several import several_figures

if TYPE_CHECKING:
    from training.utils.rewards.intervals import Figure

Sample = Mapping[str, Any]


def value_names(samples: Sequence[Sample]) -> list[str]:
    """Return the names of the values that any sample has, besides `reward`."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return [name for name in names if name == "check" or name.startswith(("check/", "reward/"))]


def each_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each prompt, prompts in the order of their first."""
    by_prompt: dict[int, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt_index"], []).append(sample)
    return list(by_prompt.values())


def of_each_prompt(samples: Sequence[Sample], name: str) -> list[list[float]]:
    """Return a value of each prompt's samples."""
    return [[float(sample[name]) for sample in of_prompt] for of_prompt in each_prompt(samples)]


def by_source(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each data source by its name in metrics: the last part of a path, or all of it if two would
    be equal. Nothing where there is one source."""
    sources: dict[str, list[Sample]] = {}
    for sample in samples:
        sources.setdefault(str(sample["columns"].get("data_source", "")), []).append(sample)
    if len(sources) < 2:
        return {}
    short = [re.sub(r"[^\w.-]", "_", source.rsplit("/", 1)[-1]) for source in sources]
    whole = [re.sub(r"[^\w.-]", "_", source) for source in sources]
    return dict(zip(short if len(set(short)) == len(short) else whole, sources.values(), strict=True))


def several_of(samples: Sequence[Sample], name: str, seed: int) -> dict[str, Figure]:
    """Return `several_figures` of a value, of the prompts whose samples all have it; nothing with one sample a prompt.
    A majority is of responses that are equal but for white space, or of equal numbers where the value's function also
    gives one named `answer`."""
    having = [sample for sample in samples if name in sample]
    values = of_each_prompt(having, name)
    most = max(map(len, values), default=0)
    if most < 2:
        return {}
    given = _answer_name(having, name)
    answers: list[list[Hashable]] = [
        [sample.get(given, _last_text(sample)) for sample in of_prompt] for of_prompt in each_prompt(having)
    ]
    whole = [place for place, each in enumerate(values) if len(each) == most]
    return several_figures([values[place] for place in whole], [answers[place] for place in whole], seed)


def _last_text(sample: Sample) -> str:
    """A response's text but for white space; of a conversation its last turn."""
    return " ".join(str(sample.get("last_turn", sample["response"])).split())


def _answer_name(samples: Sequence[Sample], name: str) -> str:
    """Return the name of the value by which samples vote. The weighted sum's is that of the only reward that has one,
    or else the checker's."""
    if name.startswith("reward/"):
        return f"reward/{name.split('/')[1]}/answer"
    answers = [other for other in value_names(samples) if re.fullmatch(r"reward/[^/]+/answer", other)]
    return answers[0] if name == "reward" and len(answers) == 1 else "check/answer"
