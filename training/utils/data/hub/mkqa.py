"""mkqa-Chinese, mkqa-Japanese: one language of the hub's mkqa, with the first of a question's answers."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.raw_dataset import load_by_name
from training.utils.data.registry import register_dataset

_HUB_NAME = "mkqa"


class _Mkqa(HubDataset):
    language = ""

    def load_raw_datasets(self, dataset_name: str) -> Any:
        return load_by_name(_HUB_NAME if dataset_name in ("mkqa-Chinese", "mkqa-Japanese") else dataset_name)

    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["queries"][self.language])

    def get_chosen(self, sample: Any) -> str | None:
        answers = sample["answers"][self.language]
        return answered(answers[0]["text"]) if answers else None


@register_dataset("mkqa-Chinese")
class MkqaChinese(_Mkqa):
    language = "zh_cn"


@register_dataset("mkqa-Japanese")
class MkqaJapanese(_Mkqa):
    language = "ja"
