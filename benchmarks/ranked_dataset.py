"""The raw dataset `benchmark_ranked`: `rows.jsonl` of the --data_path, a prompt and its responses, best first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset


@register_dataset("benchmark_ranked")
class Ranked(PromptRawDataset):
    """See the module."""

    def load_raw_datasets(self, dataset_name: str) -> list[dict[str, Any]]:
        lines = (Path(str(self.dataset_dir)) / "rows.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def get_train_data(self) -> list[dict[str, Any]]:
        return self.raw_datasets

    def get_prompt(self, sample: dict[str, Any]) -> str:
        return sample["prompt"]

    def get_responses(self, sample: dict[str, Any]) -> list[str]:
        return sample["responses"]
