"""DeepSpeed-Chat's `get_prompt_and_chosen` and `get_prompt_and_rejected`, all that its steps 1 and 2 call of a class,
as a prompt and responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from training.utils.data.sources.raw_dataset import PromptRawDataset

_ANSWER_BEGINS = "Assistant:"
PARTS_TAKEN = "with the parts, because the sentence does not begin with the prompt"


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
