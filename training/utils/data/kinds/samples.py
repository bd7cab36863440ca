"""Samples as a kind of rows reads them: the texts that a dataset class returns, checked; also those of DeepSpeed-Chat's
`get_prompt_and_chosen` and `get_prompt_and_rejected`, as a prompt and responses. Knows nothing of tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from numbers import Real
from os.path import commonprefix
from typing import Any

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.rows.tokenize import Dropped

_ANSWER_BEGINS = "Assistant:"
PARTS_TAKEN = "built from prompt and response, because the sentence does not begin with the prompt"


def has_sentences(raw: PromptRawDataset) -> bool:
    """True if the class overrides the sentences; the others join prompt and response."""
    names = ("get_prompt_and_chosen", "get_prompt_and_rejected")
    return any(getattr(type(raw), name) is not getattr(PromptRawDataset, name) for name in names)


def parts_are_taken(raw: PromptRawDataset, responses: Sequence[str], sample: Any) -> bool:
    """True if the sentence of a response does not begin with the prompt of the same row."""
    prompt = raw.get_prompt(sample)
    if prompt is None:
        return False
    sentences = (getattr(raw, f"get_prompt_and_{kind}")(sample) for kind in responses)
    return any(sentence is not None and not sentence.startswith(prompt) for sentence in sentences)


def prompt_of_sentences(sentences: Sequence[str]) -> str:
    """The prompt of a sentence, or the one that several share, for a class that has none to offer.

    It ends with the last "Assistant:" that the sentences share. Without one, a single sentence is text without a prompt
    (""), and of several it is the beginning that they share, cut behind a word.
    """
    shared = commonprefix(list(sentences))
    end = shared.rfind(_ANSWER_BEGINS)
    if end >= 0:
        return shared[: end + len(_ANSWER_BEGINS)]
    return "" if len(sentences) == 1 else shared[: max(shared.rfind(" "), shared.rfind("\n"), 0)]


# Arguments of every reward function besides a row's columns (step 3).
_REWARD_ARGUMENTS = ("prompts", "responses")


def got(raw: PromptRawDataset, getter: str, sample: Any, where: str) -> Any:
    """Return the value of `getter`; ThreestepError where it raises."""
    return call_user(getattr(raw, getter), sample, where=f"{where}: ")


def read_text(raw: PromptRawDataset, getter: str, sample: Any, where: str) -> str | None:
    """The text or None that `getter` returns; ThreestepError for anything else."""
    value = got(raw, getter, sample, where)
    if value is not None and not isinstance(value, str):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.{getter}: expected text or None, got {type(value).__name__}"
        )
    return value


def read_texts(raw: PromptRawDataset, kinds: Sequence[str], sample: Any, where: str) -> tuple[str, list[str]]:
    """The prompt and the responses, those of `kinds` or all that are ranked, best first. Raises Dropped: one is
    missing, or is blank."""
    prompt = read_text(raw, "get_prompt", sample, where)
    if prompt is None and kinds and has_sentences(raw):
        sentences = []
        for kind in kinds:
            sentence = read_text(raw, f"get_prompt_and_{kind}", sample, where)
            if sentence is None:
                raise Dropped(f"no_{kind}")
            sentences.append(sentence)
        prompt = prompt_of_sentences(sentences)
    if prompt is None:
        raise Dropped("no_prompt")
    ranked = got(raw, "get_responses", sample, where) if len(kinds) > 1 else None
    if ranked is None:
        responses = [(kind, _read_response(raw, sample, prompt, kind, where=where)) for kind in kinds]
    else:
        if len(ranked) < 2 or not all(isinstance(response, str) for response in ranked):
            raise ThreestepError(
                f"{where}: {type(raw).__name__}.get_responses: expected 2 or more strings, or None, got {len(ranked)} "
                f"responses ({', '.join(type(response).__name__ for response in ranked)})"
            )
        responses = [("response", response) for response in ranked]
    for kind, response in responses:
        if response is None:
            raise Dropped(f"no_{kind}")
        if not response.strip():
            raise Dropped("empty_response")
    return prompt, [response for _, response in responses if response is not None]


def _read_response(raw: PromptRawDataset, sample: Any, prompt: str, kind: str, *, where: str) -> str | None:
    """The text after the prompt in the sentence, the getter that DeepSpeed-Chat's subclasses surely have.

    If the sentence does not begin with the prompt, or the class has none to offer, `get_chosen` or `get_rejected` gives
    the response.
    """
    if not has_sentences(raw):
        return read_text(raw, f"get_{kind}", sample, where)
    sentence = read_text(raw, f"get_prompt_and_{kind}", sample, where)
    if sentence is None or sentence.startswith(prompt):
        return None if sentence is None else sentence[len(prompt) :]
    return read_text(raw, f"get_{kind}", sample, where)


def read_margins(raw: PromptRawDataset, sample: Any, responses: int, where: str) -> np.ndarray | None:
    """The margins between neighbours in the ranking, float32 [responses - 1], from `get_margin`."""
    margin = got(raw, "get_margin", sample, where)
    if margin is None:
        return None
    numbers = list(margin) if isinstance(margin, (Sequence, np.ndarray)) else [margin] * (responses - 1)
    numeric = all(isinstance(number, Real) and not isinstance(number, bool) for number in numbers)
    if len(numbers) != responses - 1 or not numeric or not all(0 <= number < math.inf for number in numbers):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.get_margin: expected a number of 0 or more for each pair of "
            f"adjacent responses in the ranking ({responses - 1} in all), or None, got {margin!r}"
        )
    return np.array(numbers, np.float32)


def read_carried(raw: PromptRawDataset, sample: Any, source_name: str, where: str) -> tuple[Any, dict[str, Any]]:
    """The reference (or the column `ground_truth`) and the columns of a `PromptRow`, from `get_extra`.

    Where no column `data_source` exists, it is the dataset's name.
    """
    reference = checked_json(raw, "get_reference", got(raw, "get_reference", sample, where), where)
    extra = checked_json(raw, "get_extra", got(raw, "get_extra", sample, where), where)
    if extra is not None and not isinstance(extra, dict):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.get_extra: expected a dict of values by name, or None, got "
            f"{type(extra).__name__}"
        )
    columns = {"data_source": source_name, **(extra or {})}
    taken = [name for name in _REWARD_ARGUMENTS if name in columns]
    if taken:
        raise ThreestepError(
            f"{where}: '{taken[0]}' cannot be a column name in step 3, because every reward function has an "
            "argument of that name; rename the column"
        )
    ground_truth = columns.pop("ground_truth", None)
    return ground_truth if reference is None else reference, columns


def checked_json(raw: PromptRawDataset, getter: str, value: Any, where: str) -> Any:
    """A copy of `value` as JSON holds it, as the class may use its object again; ThreestepError where JSON cannot."""
    if value is None or type(value) is str:
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.{getter}: expected a value that JSON can represent: {error}"
        ) from error
