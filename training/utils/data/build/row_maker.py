"""The raw rows of one source become tokenized rows of one kind; rows that are left out are counted. Prompts generated
during training become rows by the same code.

Knows nothing of splits, files or the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.data.build.portions import DataSource
from training.utils.data.cache.shards import Counts
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.chat.style import SavedStyle, resolved_chat, saved_beside, text_maker
from training.utils.data.formats.messages import BadConversation, Message, prompt_text, read_messages, stored_prompt
from training.utils.data.kinds.kind import (
    CROSSED,
    GLUED,
    ChatText,
    Making,
    PlainText,
    ReadSample,
    RowKind,
    check_media_are_read,
    is_glued,
)
from training.utils.data.kinds.samples import PARTS_TAKEN, has_sentences, parts_are_taken
from training.utils.data.kinds.table import KINDS
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.rows.arguments import AS_STORED, MESSAGES, RAW_CHAT
from training.utils.data.rows.tokenize import Dropped, TooLong

if TYPE_CHECKING:
    from training.utils.contracts.drawing import OpenedForm
    from training.utils.contracts.media import ReadsMedia
    from training.utils.contracts.rows import Row
    from training.utils.data.arguments import DataArguments
    from training.utils.data.rows.tokenize import TextTokenizer

ROWS_PER_CALL = 1024  # of the tokenizer
CHARACTERS_PER_CALL = 2**20  # from which on it is called with fewer: an encoding takes some hundred bytes a token
GENERATED = "generated"
_WHERE = "a generated prompt"
_LEAVES_OUT = (Dropped, BadConversation)


class RowMaker:
    """Turns the raw rows of one source into rows of one kind, `ROWS_PER_CALL` at a time, fewer of long ones."""

    def __init__(
        self,
        kind: RowKind,
        data: DataArguments,
        texts: TextTokenizer | ChatTokenizer,
        source: DataSource,
        *,
        counts: Counts,
        form: OpenedForm | None = None,
        media: ReadsMedia | None = None,
    ) -> None:
        """form: that responses may have. media: reads those of the rows; None where the model reads text alone."""
        self._kind = kind
        self._source = source
        self._counts = counts
        rows, raw = data.rows, source.raw
        self._is_chat = isinstance(texts, ChatTokenizer)
        self._drops_bad = self._is_chat and data.chat.bad_conversations == "drop"
        self._strategy: PlainText | ChatText
        if isinstance(texts, ChatTokenizer):
            weighed = rows.loss_on if kind.weighs_messages else None
            raw_chat = bool({RAW_CHAT, MESSAGES} & set(rows.return_columns))
            self._strategy = ChatText(texts, raw, media, data.chat.train_turns, raw_chat, weighed)
            self._read: Callable[[Sequence[str], Any, str], ReadSample] = partial(kind.read_chat, self._strategy)
            texts = texts.texts
        else:
            self._strategy = PlainText(texts, raw, rows, kind.weighs_messages, source.keeps_answers)
            self._read = self._strategy.read
        self._has_sentences = has_sentences(raw)
        reader = None if form is None else form.reader(counts.parallel)
        self._making = Making(rows, texts, counts, reader, media)

    def rows(self, rows: Sequence[Any], indices: Iterable[int], first_id: int) -> Iterator[Row]:
        """The records of the rows at `indices`; the row at index i has the id `first_id` + i.

        Getters are handed a copy of a row that stays in memory: they may change it, and it is read again.
        """
        waiting: list[ReadSample] = []
        characters = 0
        for index in map(int, indices):
            sample = deepcopy(rows[index]) if isinstance(rows, (list, tuple)) else rows[index]
            try:
                waiting.append(self._take(sample, first_id + index, f"dataset '{self._source.name}', row {index}"))
            except _LEAVES_OUT as reason:
                self._count_drop(reason)
                continue
            characters += sum(len(piece.text) for piece in waiting[-1].pieces)
            if len(waiting) == ROWS_PER_CALL or characters >= CHARACTERS_PER_CALL:
                yield from self._made(waiting)
                waiting, characters = [], 0
        if waiting:
            yield from self._made(waiting)

    def _take(self, sample: Any, row_id: int, where: str) -> ReadSample:
        kind, raw = self._kind, self._source.raw
        if self._making.media is None or not self._is_chat:
            check_media_are_read(raw, sample, self._making.media, where)
        mark = raw.get_mark(sample)
        if mark in kind.dropped_marks:
            raise Dropped(kind.dropped_marks[mark])
        responses = kind.responses_of(mark)
        read = self._read(responses, sample, where)
        self._counts.noted.update(read.noted)
        if self._has_sentences and parts_are_taken(raw, responses, sample):
            self._counts.noted[PARTS_TAKEN] += 1
        if responses and not self._is_chat and is_glued(read):
            self._counts.noted[GLUED] += 1
        read.row_id, read.carried = row_id, kind.carried(raw, sample, read, self._source.name)
        return read

    def _made(self, waiting: Sequence[ReadSample]) -> Iterator[Row]:
        for sample, encoded in zip(waiting, self._strategy.encode(waiting), strict=True):
            if encoded.crosses:
                self._counts.noted[CROSSED] += 1
            try:
                yield self._kind.make(self._making, sample, encoded.parts)
            except _LEAVES_OUT as reason:
                self._count_drop(reason)
            except TooLong as long:
                text = "sentence" if self._kind.responses else "prompt"
                limit, truncation = self._kind.limit, self._kind.truncation
                raise ThreestepError(
                    f"dataset '{self._source.name}', row id {sample.row_id}: a {text} has {long.length_tokens} tokens, "
                    f"but --{limit} is {getattr(self._making.flags, limit)} and --{truncation} is 'error'; raise "
                    f"--{limit} or change --{truncation}"
                ) from None

    def _count_drop(self, reason: Exception) -> None:
        """Count a row that is left out; raise the reason where it is a mistake."""
        if isinstance(reason, Dropped):
            self._counts.dropped[str(reason)] += 1
        elif self._drops_bad:
            self._counts.dropped["bad_conversation"] += 1
        else:
            raise reason


class PromptMaker:
    """Makes prompts of phase 3 from texts or messages, in the style of the flags or of the model. `counts`: of rows
    that were cut and dropped."""

    def __init__(self, data: DataArguments, tokenizer: Any, media: ReadsMedia | None = None) -> None:
        """media: reads those that parts of messages hold; None where the model reads text alone."""
        self.counts = Counts()
        style, texts = resolved_chat(data.chat, tokenizer).prompt_style, text_maker(data.chat, tokenizer)
        saved = saved_beside(data.chat, tokenizer)
        raw = _Generated(saved if saved and saved.prompt_style == style else SavedStyle(style))
        source = DataSource(GENERATED, raw, data.split.data_split)
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
    def __init__(self, style: SavedStyle) -> None:
        self._style = style
        self.dataset_name = self.dataset_clean_name = GENERATED

    def get_prompt(self, sample: Any) -> str | None:
        messages = self.get_prompt_messages(sample)
        if messages is None or self._style.prompt_style != AS_STORED:
            return sample["prompt"] if messages is None else prompt_text(messages, None, _WHERE, self._style.frame)
        text = stored_prompt(messages, "a conversation")
        end = self._style.prompt_end
        return text if not text or text.endswith(end) else text.rstrip() + end

    def get_prompt_messages(self, sample: Any) -> list[Message] | None:
        prompt = sample["prompt"]
        return None if isinstance(prompt, str) else read_messages(list(prompt), _WHERE)

    def get_reference(self, sample: Any) -> Any:
        return sample["ground_truth"]

    def get_extra(self, sample: Any) -> dict[str, Any]:
        return sample["columns"]
