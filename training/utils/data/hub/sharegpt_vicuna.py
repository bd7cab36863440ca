"""pvduy/sharegpt_alpaca_oa_vicuna_format: conversations as text with the speakers USER and ASSISTANT."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered
from training.utils.data.registry import register_dataset


@register_dataset("pvduy/sharegpt_alpaca_oa_vicuna_format")
class SharegptVicuna(HubDataset):
    eval_split = "test"

    def get_prompt(self, sample: Any) -> str | None:
        prompt = sample["prompt"]
        return None if prompt is None else prompt.replace("USER", "Human").replace("ASSISTANT", "Assistant")

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["label"])
