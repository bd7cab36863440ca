"""Hello-SimpleAI/HC3-Chinese: Chinese questions with answers by people, of which the first is taken."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.registry import register_dataset


@register_dataset("Hello-SimpleAI/HC3-Chinese")
class Hc3Chinese(HubDataset):
    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["question"])

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["human_answers"][0]) if sample["human_answers"] else None
