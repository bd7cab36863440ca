"""openai/webgpt_comparisons: two answers with a score each; the higher is chosen."""

from __future__ import annotations

import re
from typing import Any

from training.utils.data.hub.base import HubDataset, asked
from training.utils.data.registry import register_dataset

_CITATION = re.compile(r"\s*\[\d+(?:\s*,\s*\d+)*\]")


@register_dataset("openai/webgpt_comparisons")
class WebgptComparisons(HubDataset):
    """Marks of citations such as [1, 2] are taken out. Of equal scores the first answer is chosen, as in
    DeepSpeed-Chat."""

    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["question"]["full_text"])

    def get_chosen(self, sample: Any) -> str | None:
        return _answer(sample, better=True)

    def get_rejected(self, sample: Any) -> str | None:
        return _answer(sample, better=False)


def _answer(sample: Any, *, better: bool) -> str:
    first_is_better = float(sample["score_0"]) >= float(sample["score_1"])
    answer = sample["answer_0"] if first_is_better == better else sample["answer_1"]
    return " " + _CITATION.sub("", answer).strip()
