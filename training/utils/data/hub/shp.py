"""stanfordnlp/SHP: two comments on a post; `labels` is 1 where the first was preferred."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.registry import register_dataset


@register_dataset("stanfordnlp/SHP")
class StanfordShp(HubDataset):
    eval_split = "validation"

    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["history"])

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["human_ref_A" if int(sample["labels"]) == 1 else "human_ref_B"])

    def get_rejected(self, sample: Any) -> str | None:
        return answered(sample["human_ref_B" if int(sample["labels"]) == 1 else "human_ref_A"])
