"""Dahoas/rm-static, Dahoas/full-hh-rlhf: whole conversations as text, stored as the model is to see them.
Dahoas/synthetic-instruct-gptj-pairwise: one instruction and two answers."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset, answered, asked
from training.utils.data.registry import register_dataset


@register_dataset("Dahoas/rm-static", "Dahoas/full-hh-rlhf")
class DahoasConversations(HubDataset):
    eval_split = "test"

    def get_prompt(self, sample: Any) -> str | None:
        return sample["prompt"]

    def get_chosen(self, sample: Any) -> str | None:
        return sample["chosen"]

    def get_rejected(self, sample: Any) -> str | None:
        return sample["rejected"]


@register_dataset("Dahoas/synthetic-instruct-gptj-pairwise")
class SyntheticInstruct(HubDataset):
    def get_prompt(self, sample: Any) -> str | None:
        return asked(sample["prompt"])

    def get_chosen(self, sample: Any) -> str | None:
        return answered(sample["chosen"])

    def get_rejected(self, sample: Any) -> str | None:
        return answered(sample["rejected"])
