"""Serves dataset files of users, which import `register_dataset` from here (docs/data.md)."""

from training.utils.data.sources.registry import register_dataset

__all__ = ["register_dataset"]
