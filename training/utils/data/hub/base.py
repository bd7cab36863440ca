"""What the datasets of this folder share: named splits, and DeepSpeed-Chat's text of one question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.data.raw_dataset import PromptRawDataset


class HubDataset(PromptRawDataset):
    """Rows of the split "train", and of `eval_split` where the dataset has one."""

    eval_split: str | None = None

    def get_train_data(self) -> Sequence[Any]:
        return self.raw_datasets["train"]

    def get_eval_data(self) -> Sequence[Any] | None:
        return self.raw_datasets[self.eval_split] if self.eval_split else None


def asked(question: str | None) -> str | None:
    """A prompt of one question; None where there is none."""
    return None if question is None else f" Human: {question} Assistant:"


def answered(answer: str | None) -> str | None:
    """A response as it stands behind such a prompt; None where there is none."""
    return None if answer is None else " " + answer
