"""The contract of a raw dataset: rows in, texts out. Knows nothing of tokens, splits or phases' files.

A subclass written for DeepSpeed-Chat works unchanged; what is new here is optional.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from training.utils.run.errors import ThreestepError

ALL_PHASES = (1, 2, 3)


class PromptRawDataset:
    """One source of prompts and responses.

    A subclass sets `dataset_name` and `dataset_clean_name` (a name fit for a file) and gives the rows
    (`get_train_data`, `get_eval_data`: any sequence with `len` and `[i]`) and their texts. A text getter that
    returns None drops that row from the phases that need the text.

    `dataset_dir` is the folder given by `--dataset_dir` (None where none is given). It is set on the instance
    before its constructor runs, so a subclass may read it there.

    The constructor loads `raw_datasets` by name, as DeepSpeed-Chat's does: from disk where the name is a
    path that exists, otherwise from the hub. A class that reads or makes its rows itself overrides
    `load_raw_datasets`.
    """

    dataset_name: str = ""
    dataset_clean_name: str = ""
    dataset_dir: str | None = None

    def __init__(self, output_path: str, seed: int, local_rank: int, dataset_name: str) -> None:
        self.output_path = output_path
        self.seed = seed
        self.local_rank = local_rank
        self.dataset_name = dataset_name
        self.dataset_clean_name = dataset_name.replace("/", "_")
        self.raw_datasets: Any = self.load_raw_datasets(dataset_name)

    def load_raw_datasets(self, dataset_name: str) -> Any:
        """Load `raw_datasets`: a mapping from split name to rows."""
        return load_by_name(dataset_name)

    # The rows.

    def get_train_data(self) -> Sequence[Any]:
        raise NotImplementedError(f"{type(self).__name__} has no get_train_data")

    def get_eval_data(self) -> Sequence[Any] | None:
        """Rows for evaluation alone; None (or no rows) where there are none, and a share is then carved."""
        return None

    # Their texts.

    def get_prompt(self, sample: Any) -> str | None:
        """The prompt, for instance "Human: ... Assistant:"."""
        return None

    def get_chosen(self, sample: Any) -> str | None:
        """The better response, for instance " ..."."""
        return None

    def get_rejected(self, sample: Any) -> str | None:
        """The worse response, None where there is none."""
        return None

    def get_prompt_and_chosen(self, sample: Any) -> str | None:
        return _joined(self.get_prompt(sample), self.get_chosen(sample))

    def get_prompt_and_rejected(self, sample: Any) -> str | None:
        return _joined(self.get_prompt(sample), self.get_rejected(sample))

    # Beyond DeepSpeed-Chat; all optional.

    def get_responses(self, sample: Any) -> list[str] | None:
        """K >= 2 responses ranked best first; None stands for chosen and rejected."""
        return None

    def get_margin(self, sample: Any) -> float | Sequence[float] | None:
        """By how much the reward model's score of a better response is to exceed that of a worse one.

        One number from 0 up holds between each two neighbours of the ranking (of a pair: between chosen and
        rejected); K - 1 numbers give each two neighbours their own. Responses further apart in the ranking have the
        sum of what lies between them. None counts as 0. Step 2 reads it where --margin_scale is above 0.
        """
        return None

    def get_reference(self, sample: Any) -> Any:
        """What a rule-based reward checks a response against: a string, or any other JSON value."""
        return None

    def get_phases(self, sample: Any) -> tuple[int, ...]:
        """The phases that this row may serve, out of 1, 2 and 3; the row goes to one of them.

        Rows that serve the same phases are shared between them by `data_split`; a row that serves one phase
        goes there whole. Override where rows differ, for instance pairs for phase 2 beside solutions for 1
        and 3.
        """
        return ALL_PHASES

    def check_phase(self, phase: int) -> None:
        """Raise ThreestepError where this source as a whole cannot serve a phase that it is asked for."""

    def get_fingerprint(self) -> str | None:
        """A string that changes whenever a row or text of this dataset may change; None: the rows are hashed.

        Worth overriding where rows come from large files: `fingerprint.digest_files` hashes files once.
        """
        return None


def _joined(prompt: str | None, response: str | None) -> str | None:
    return None if prompt is None or response is None else prompt + response


def load_by_name(dataset_name: str, config_name: str | None = None) -> Any:
    """Load a dataset from the folder of that name where it exists, otherwise from the hub.

    A folder may be one that `save_to_disk` wrote or one of data files. Raises ThreestepError where neither
    works.
    """
    import datasets

    try:
        if os.path.exists(dataset_name):
            saved = ("dataset_dict.json", "state.json")
            if any(os.path.isfile(os.path.join(dataset_name, name)) for name in saved):
                return datasets.load_from_disk(dataset_name)
            return datasets.load_dataset(dataset_name, config_name)
        return datasets.load_dataset(dataset_name, config_name)
    except Exception as error:  # the hub's client and the readers raise a dozen unrelated classes
        where = "from the folder" if os.path.exists(dataset_name) else "from the hub"
        first_line = (str(error).splitlines() or [""])[0]
        raise ThreestepError(
            f"dataset '{dataset_name}' could not be loaded {where}: {type(error).__name__}: {first_line}; "
            "check the name and the network, or give a folder that save_to_disk wrote and whose path ends in "
            "the dataset's name"
        ) from error
