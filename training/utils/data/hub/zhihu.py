"""wangrui6/Zhihu-KOL: Chinese questions with an answer each."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.registry import register_dataset


@register_dataset("wangrui6/Zhihu-KOL")
class ZhihuKol(HubDataset):
    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["INSTRUCTION"])

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["RESPONSE"])
