"""yitingxie/rlhf-reward-datasets: the responses are stored with "Assistant:" in front, which belongs to the prompt."""

from __future__ import annotations

from typing import Any

from training.utils.data.hub.base import HubDataset
from training.utils.data.registry import register_dataset


@register_dataset("yitingxie/rlhf-reward-datasets")
class RlhfRewardDatasets(HubDataset):
    eval_split = "test"

    def get_prompt(self, sample: Any) -> str | None:
        return None if sample["prompt"] is None else sample["prompt"] + "Assistant:"

    def get_chosen(self, sample: Any) -> str | None:
        return _without_speaker(sample["chosen"])

    def get_rejected(self, sample: Any) -> str | None:
        return _without_speaker(sample["rejected"])


def _without_speaker(response: str | None) -> str | None:
    """What the assistant says; a later "Assistant:" is part of that (DeepSpeed-Chat keeps what stands behind the
    last)."""
    if response is None or not response.lstrip().startswith("Assistant:"):
        return response
    return response.partition("Assistant:")[2]
