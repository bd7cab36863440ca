"""Cohere/miracl-zh-queries-22-12, Cohere/miracl-ja-queries-22-12: a passage that answers the query against one that
does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.registry import register_dataset


@register_dataset("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")
class Miracl(HubDataset):
    eval_split = "dev"

    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["query"])

    def get_chosen(self, sample: Any) -> str | None:
        return _first_passage(sample["positive_passages"])

    def get_rejected(self, sample: Any) -> str | None:
        return _first_passage(sample["negative_passages"])


def _first_passage(passages: Sequence[Any]) -> str | None:
    return answered(passages[0]["text"]) if passages else None
