"""local/jsonfile: data/train.json and, where it exists, data/eval.json, with `prompt`, `chosen` and `rejected`.

They are in the `--data_path` where that is a folder whose path ends in local/jsonfile, or in the working folder; in
each of them below data/, as in DeepSpeed-Chat, or directly. Each holds one JSON list, or one JSON object per line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.hub_datasets.datasets import HubDataset, answered
from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Expected
from training.utils.data.files.digests import digest_files
from training.utils.data.files.readers import open_rows
from training.utils.data.registry import register_dataset

if TYPE_CHECKING:
    from training.utils.data.files.readers import Rows

# Another whenever the same sources make other rows (see `fingerprint`).
ROWS_VERSION = "ddf09ebb2651715fdec943d4fdd60b132c8d94c87fb566fe64a11726b6d06625"
_EXPECTED = Expected(texts=("prompt", "chosen", "rejected"))


@register_dataset("local/jsonfile")
class LocalJsonFile(HubDataset):
    """Each text gets a space in front, as in DeepSpeed-Chat."""

    is_on_hub = False
    texts = (
        lambda row: answered(row.get("prompt")),
        lambda row: answered(row.get("chosen")),
        lambda row: answered(row.get("rejected")),
    )

    def load_raw_datasets(self, dataset_name: str) -> dict[str, str]:
        """The paths of the files by split; the rows are read on demand."""
        self._rows: dict[str, Rows] = {}
        base = self.dataset_dir or "."
        for folder in (os.path.join(base, "data"), base):
            paths = {name: os.path.join(folder, f"{name}.json") for name in ("train", "eval")}
            if os.path.isfile(paths["train"]):
                return {name: path for name, path in paths.items() if os.path.isfile(path)}
        raise ThreestepError(
            f"local/jsonfile: '{os.path.join(base, 'data', 'train.json')}' does not exist; pass the folder that "
            "contains data/train.json and data/eval.json as --data_path (its path must end in local/jsonfile)"
        )

    def get_train_data(self) -> Sequence[Any]:
        return self._read("train")

    def get_eval_data(self) -> Sequence[Any] | None:
        return self._read("eval") if "eval" in self.raw_datasets else None

    def _read(self, split: str) -> Rows:
        if split not in self._rows:
            self._rows[split] = open_rows("jsonl", [self.raw_datasets[split]], None, _EXPECTED)
        return self._rows[split]

    def get_fingerprint(self) -> str:
        return digest_files(self.raw_datasets.values(), self.output_path)
