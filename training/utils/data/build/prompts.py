"""Prompts generated during training become rows by the same code as the dataset's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.contracts.rows import PromptRow
from training.utils.data.build.portions import DataSource
from training.utils.data.build.row_maker import RowMaker
from training.utils.data.cache.reports import Counts
from training.utils.data.chat.chat import text_maker
from training.utils.data.chat.style import resolved_chat, saved_beside
from training.utils.data.kinds.table import KINDS
from training.utils.data.rows.arguments import AS_STORED
from training.utils.data.sources.formats.messages import Message, prompt_text, read_messages, stored_prompt
from training.utils.data.sources.raw_dataset import PromptRawDataset

if TYPE_CHECKING:
    from training.utils.contracts.media import ReadsMedia
    from training.utils.data.build.arguments import DataArguments

NAME = "generated"


class PromptMaker:
    """Makes prompts of phase 3 from texts or messages, in the style of the flags or of the model. `counts`: of rows
    that were cut and dropped."""

    def __init__(self, data: DataArguments, tokenizer: Any, media: ReadsMedia | None = None) -> None:
        """media: reads those that parts of messages hold; None where the model reads text alone."""
        self.counts = Counts()
        style, texts = resolved_chat(data.chat, tokenizer).prompt_style, text_maker(data.chat, tokenizer)
        saved = saved_beside(data.chat, tokenizer) if style == AS_STORED else None
        source = DataSource(NAME, _Generated(style, saved.prompt_end if saved else ""), data.split.data_split)
        self._maker = RowMaker(KINDS["prompts"], data, texts, source, counts=self.counts, media=media)

    def make(
        self, prompt: str | Sequence[Message], ground_truth: Any, row_id: int, /, **columns: Any
    ) -> PromptRow | None:
        """Return the row; None where a dataset's would be dropped, ThreestepError where a dataset's would raise it.

        prompt: as a dataset gives it, or chat messages; of these, a model with the style as_stored sees the last alone.
        """
        sample = {"prompt": prompt, "ground_truth": ground_truth, "columns": columns}
        row = next(self._maker.rows([sample], [0], row_id), None)
        assert row is None or isinstance(row, PromptRow)
        return row


class _Generated(PromptRawDataset):
    def __init__(self, style: str, prompt_end: str) -> None:
        self._style, self._prompt_end = style, prompt_end
        self.dataset_name = self.dataset_clean_name = NAME

    def get_prompt(self, sample: Any) -> str | None:
        messages = self.get_prompt_messages(sample)
        if messages is None or self._style != AS_STORED:
            return sample["prompt"] if messages is None else prompt_text(messages, None, "a generated prompt")
        text = stored_prompt(messages, "a conversation")
        return text if not text or text.endswith(self._prompt_end) else text.rstrip() + self._prompt_end

    def get_prompt_messages(self, sample: Any) -> list[Message] | None:
        prompt = sample["prompt"]
        return None if isinstance(prompt, str) else read_messages(list(prompt), "a generated prompt")

    def get_reference(self, sample: Any) -> Any:
        return sample["ground_truth"]

    def get_extra(self, sample: Any) -> dict[str, Any]:
        return sample["columns"]
