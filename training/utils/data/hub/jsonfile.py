"""local/jsonfile: data/train.json and, where it exists, data/eval.json, with `prompt`, `chosen` and `rejected`.

The files are looked for in `--dataset_dir`, in a folder whose path ends in local/jsonfile and is the `--data_path`
itself, or in the folder that the program runs in; in each below data/, as in DeepSpeed-Chat, or right there. Each
holds one JSON list, or one JSON object a line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from training.utils.data.fingerprint import digest_files
from training.utils.data.hub.base import answered
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.readers import Expected, JsonLines, JsonList, Rows
from training.utils.data.registry import register_dataset
from training.utils.run.errors import ThreestepError

_EXPECTED = Expected(texts=("prompt", "chosen", "rejected"))


@register_dataset("local/jsonfile")
class LocalJsonFile(PromptRawDataset):
    """A space is put in front of each text, as in DeepSpeed-Chat: "prompt chosen" is the sentence."""

    def load_raw_datasets(self, dataset_name: str) -> dict[str, str]:
        """The paths of the files by split; the rows are read when they are asked for."""
        self._rows: dict[str, Rows] = {}
        base = dataset_name if os.path.isdir(dataset_name) else self.dataset_dir or "."
        for folder in (os.path.join(base, "data"), base):
            paths = {name: os.path.join(folder, f"{name}.json") for name in ("train", "eval")}
            if os.path.isfile(paths["train"]):
                return {name: path for name, path in paths.items() if os.path.isfile(path)}
        raise ThreestepError(
            f"local/jsonfile: there is no file '{os.path.join(base, 'data', 'train.json')}'; --dataset_dir is the "
            "folder that holds data/train.json and data/eval.json"
        )

    def get_train_data(self) -> Sequence[Any]:
        return self._read("train")

    def get_eval_data(self) -> Sequence[Any] | None:
        return self._read("eval") if "eval" in self.raw_datasets else None

    def _read(self, split: str) -> Rows:
        if split not in self._rows:
            path = self.raw_datasets[split]
            with open(path, "rb") as file:
                reader = JsonList if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") else JsonLines
            self._rows[split] = reader(path, _EXPECTED)
        return self._rows[split]

    def get_fingerprint(self) -> str:
        return digest_files(self.raw_datasets.values(), self.output_path)

    def get_prompt(self, sample: Mapping[str, Any]) -> str | None:
        return answered(sample.get("prompt"))

    def get_chosen(self, sample: Mapping[str, Any]) -> str | None:
        return answered(sample.get("chosen"))

    def get_rejected(self, sample: Mapping[str, Any]) -> str | None:
        return answered(sample.get("rejected"))
