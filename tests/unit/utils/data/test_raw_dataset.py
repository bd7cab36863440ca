"""The short import paths that the README names for users' dataset files, and what is behind them."""

from __future__ import annotations

import training.utils.data.raw_dataset as raw_dataset_door
import training.utils.data.registry as registry_door
from training.utils.data.sources import raw_dataset, registry


def test_both_paths_give_the_same_objects():
    assert raw_dataset_door.PromptRawDataset is raw_dataset.PromptRawDataset
    assert raw_dataset_door.load_by_name is raw_dataset.load_by_name
    assert registry_door.register_dataset is registry.register_dataset
