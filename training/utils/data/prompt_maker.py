"""Prompts that are made while training runs become rows by the same code as the dataset's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.data.arguments import DataArguments
from training.utils.data.build import row_maker, text_maker
from training.utils.data.message_forms import Message, prompt_text, read_messages
from training.utils.data.phases import PromptRow
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.reports import Counts
from training.utils.data.sources import Source

NAME = "generated"


class PromptMaker:
    """Makes rows of phase 3 from texts or messages. `counts` says what it cut and left out."""

    def __init__(self, data: DataArguments, tokenizer: Any) -> None:
        self.counts = Counts()
        source = Source(NAME, _Generated(), data.data_split)
        self._maker = row_maker(3, data, text_maker(data, tokenizer, None), source, self.counts)

    def make(
        self, prompt: str | Sequence[Message], ground_truth: Any, row_id: int, /, **columns: Any
    ) -> PromptRow | None:
        """Return the row; None where it is left out, as one of the dataset would be (too long, empty).

        prompt: as the dataset gives it ("Human: ... Assistant:" without a chat template), or chat messages. Raises
        ThreestepError for what the data flags make an error.
        """
        sample = {"prompt": prompt, "ground_truth": ground_truth, "columns": columns}
        for row in self._maker.rows([sample], [0], row_id):
            assert isinstance(row, PromptRow)
            return row
        return None


class _Generated(PromptRawDataset):
    def __init__(self) -> None:
        self.dataset_name = self.dataset_clean_name = NAME

    def get_prompt(self, sample: Any) -> str | None:
        messages = self.get_prompt_messages(sample)
        return sample["prompt"] if messages is None else prompt_text(messages, None, "a generated prompt")

    def get_prompt_messages(self, sample: Any) -> list[Message] | None:
        prompt = sample["prompt"]
        return None if isinstance(prompt, str) else read_messages(list(prompt), "a generated prompt")

    def get_reference(self, sample: Any) -> Any:
        return sample["ground_truth"]

    def get_extra(self, sample: Any) -> dict[str, Any]:
        return sample["columns"]
