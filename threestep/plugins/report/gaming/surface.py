"""Surface features of responses, which a reward may pay for where it means something else: length, format, repetition,
sameness. Knows no reward.

A sample is a mapping: `response` (`last_turn` of a conversation, which rewards read) and `response_tokens`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Sample = Mapping[str, Any]

_MARK = re.compile(r"[^\w\s]")
_WORD = re.compile(r"\w+|[^\w\s]")


def text_of(sample: Sample) -> str:
    """The text that a sample's reward has read."""
    return str(sample.get("last_turn", sample.get("response", "")))


def marks(text: str) -> float:
    """Share of the characters, white space aside, that are neither letters nor digits: punctuation, markup, symbols."""
    return len(_MARK.findall(text)) / max(sum(not letter.isspace() for letter in text), 1)


def lines(text: str) -> float:
    """Number of lines."""
    return float(text.strip().count("\n") + 1)


def repetition(text: str) -> float:
    """Share of the pairs of neighbouring words that were in the text before: seq-rep-n of Welleck et al. 2020 with
    n = 2, as many responses are short."""
    words = _WORD.findall(text)
    pairs = list(zip(words, words[1:], strict=False))
    return 1.0 - len(set(pairs)) / len(pairs) if pairs else 0.0


_OF_TEXT: dict[str, Callable[[str], float]] = {"marks": marks, "lines": lines, "repetition": repetition}
FEATURES = {  # in words, for people
    "length": "tokens in the response",
    "marks": "fraction of the response's characters that are punctuation, markup or symbols",
    "lines": "number of lines",
    "repetition": "fraction of the response's adjacent word pairs that occurred earlier in it",
    "sameness": "1 if another prompt got the same response",
}


def features_of(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The features of each sample of one evaluation, by their names in `FEATURES`."""
    texts = [text_of(sample) for sample in samples]
    prompts: dict[str, set[Any]] = {}
    for text, sample in zip(texts, samples, strict=True):
        prompts.setdefault(text.strip(), set()).add(sample.get("prompt_index"))
    counts = Counter({text: len(of_text) for text, of_text in prompts.items()})
    return {
        "length": [float(sample.get("response_tokens") or 0) for sample in samples],
        **{name: [measure(text) for text in texts] for name, measure in _OF_TEXT.items()},
        "sameness": [float(counts[text.strip()] > 1) for text in texts],
    }
