"""lmqg/qg_jaquad, lmqg/qag_jaquad: Japanese questions with the sentence or paragraph that answers them."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.registry import register_dataset


@register_dataset("lmqg/qg_jaquad")
class QgJaquad(HubDataset):
    eval_split = "validation"

    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["question"])

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["sentence"])


@register_dataset("lmqg/qag_jaquad")
class QagJaquad(HubDataset):
    eval_split = "validation"

    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["questions"][0]) if sample["questions"] else None

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["paragraph"])
