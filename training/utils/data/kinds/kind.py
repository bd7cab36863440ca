"""A kind of rows: its share of the data, its record, and its making. Knows nothing of splits, files or the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import ReadsMedia
    from training.utils.contracts.media_spans import MediaSpan
    from training.utils.contracts.rows import Row
    from training.utils.contracts.text_forms import FormReader, RowForm
    from training.utils.data.cache.reports import Counts
    from training.utils.data.chat.arguments import ChatArguments
    from training.utils.data.chat.chat import TextPiece
    from training.utils.data.kinds.strategies import ChatText, ReadSample
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.data.rows.tokenize import Ids, TextTokenizer
    from training.utils.data.sources.raw_dataset import PromptRawDataset


@dataclass(slots=True)
class Waiting:
    """A sample that waits for the tokenizer. carried: of `RowKind.carried`."""

    row_id: int
    sample: ReadSample
    carried: dict[str, Any]


@dataclass(frozen=True)
class Making:
    """reader: of the form of responses; None where each is one run of tokens.
    media: reads those of the rows; None where the model reads text alone.
    """

    source_name: str
    flags: RowArguments
    texts: TextTokenizer
    counts: Counts
    reader: FormReader | None
    media: ReadsMedia | None

    def form_of(self, texts: Sequence[Sequence[int]], where: str, loss: Sequence[bool] | None = None) -> RowForm | None:
        """See `FormReader`."""
        return None if self.reader is None else self.reader.form_of(texts, where, loss)

    def spans(self, one: Waiting, ids: Ids, others: Sequence[Ids] = ()) -> tuple[MediaSpan, ...]:
        """Spans of a row's media in its tokens `ids`; none may stand in `others`."""
        if self.media is None:
            return ()
        for each in others:
            self.media.spans(each, (), one.sample.where)
        return self.media.spans(ids, one.sample.media, one.sample.where)

    def after_cut(self, spans: tuple[MediaSpan, ...], kept: Sequence[int]) -> tuple[MediaSpan, ...]:
        """Spans in a row that was cut. kept: positions of the tokens that stay, ascending. Raises Dropped where a
        medium is cut off."""
        return () if self.media is None else self.media.after_cut(spans, kept)

    def count_ends(self, learnt: Iterable[tuple[TextPiece, Ids]]) -> None:
        """Count the special tokens that carry loss: those at the end of a response, and those before it."""
        special = self.texts.special
        for piece, ids in learnt:
            last = ids[-1] if piece.is_end and ids else None
            before = ids if last is None else ids[:-1]
            if not special.keys().isdisjoint(before):
                self.counts.inside.update(special[token] for token in before if token in special)
            if last in special:
                self.counts.ends[special[last]] += 1


class RowKind(ABC):
    """A kind of rows; the table has one object of each class.

    name: in the table.
    phase: whose share of `--data_split` it takes.
    key: names its folders in the cache.
    record: whose fields are stored as its `stored` says.
    responses: of a sample, as the getters name them, best first; none: the rows are prompts.
    dropped_marks: of samples (`get_mark`) that are left out, with the reason.
    columns: roles of columns that this kind alone reads.
    carries_columns: rows carry all others, for rewards.
    limit, truncation: the flags of the rows' length.
    needs_pad: batches of it may be padded.
    weighs_messages: the loss follows the weights of messages, and which turns are trained is a choice.
    hints: advice where all rows are dropped, by the reason.
    loss: the tokens that carry it.
    """

    name: ClassVar[str]
    phase: ClassVar[int]
    key: ClassVar[str]
    record: ClassVar[type[Row]]
    responses: ClassVar[tuple[str, ...]] = ()
    dropped_marks: ClassVar[dict[bool | None, str]] = {}
    columns: ClassVar[tuple[str, ...]] = ()
    carries_columns: ClassVar[bool] = False
    limit: ClassVar[str] = "max_seq_len"
    truncation: ClassVar[str] = "truncation"
    needs_pad: ClassVar[bool] = True
    weighs_messages: ClassVar[bool] = False
    hints: ClassVar[dict[str, str]] = {}
    loss: ClassVar[str] = ""

    @property
    def shares_prompt(self) -> bool:
        """True if the responses of a row share their prompt."""
        return len(self.responses) > 1

    def parts(self, rows: RowArguments, texts: TextTokenizer) -> dict[str, str]:
        """The parts of the cache's fingerprint that other kinds may lack."""
        return {
            "max_seq_len": str(rows.max_seq_len),
            "truncation": rows.truncation,
            "end of conversation": str(texts.end_id),
        }

    def responses_of(self, mark: bool | None) -> tuple[str, ...]:
        """The responses of a sample with this mark."""
        return self.responses

    @abstractmethod
    def read_chat(self, chat: ChatText, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        """The sample under a chat template. responses: of `responses_of`. Raises Dropped, BadConversation, and
        ThreestepError for a mistake."""

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        """Fields of the record that are not of tokens, by name."""
        return {}

    @abstractmethod
    def make(self, making: Making, one: Waiting, ids: list[Ids]) -> Row:
        """The row. ids: of the sample's pieces. Raises Dropped, TooLong, ThreestepError."""

    @abstractmethod
    def document(self, row: Any) -> Document:
        """The row as a policy reads it."""

    def loss_in_words(self, rows: RowArguments, chat: ChatArguments) -> str:
        """The tokens that carry loss."""
        return self.loss
