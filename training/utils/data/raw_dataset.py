"""Serves dataset files of users, which import `PromptRawDataset` from here (docs/data.md)."""

from training.utils.data.sources.raw_dataset import PromptRawDataset, load_by_name

__all__ = ["PromptRawDataset", "load_by_name"]
