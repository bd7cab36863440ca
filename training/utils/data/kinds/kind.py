"""A kind of rows, and how samples become such rows: as plain text, or under a chat template.

A sample is read (`PlainText.read`, `RowKind.read_chat`), many are encoded at once (`encode`), and each becomes a row
(`RowKind.make`). Knows nothing of splits, files or the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.data.chat.chat import ChatTokenizer, TextPiece
from training.utils.data.formats.messages import (
    BadConversation,
    Conversation,
    Message,
    check_weights,
    checked_messages,
    checked_tools,
    has_weights,
    messages_of_text,
    prompt_text,
    response_text,
    split_weights,
)
from training.utils.data.kinds.samples import checked_json, got, read_texts
from training.utils.data.rows.arguments import MESSAGES, RAW_CHAT
from training.utils.data.rows.tokenize import Dropped, EncodedParts, Ids, TextTokenizer

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document, MediaSpan
    from training.utils.contracts.drawing import FormReader, RowForm
    from training.utils.contracts.media import ReadsMedia, RowMedium
    from training.utils.contracts.rows import Row
    from training.utils.data.cache.shards import Counts
    from training.utils.data.raw_dataset import PromptRawDataset
    from training.utils.data.rows.arguments import RowArguments

CROSSED = "in which one token spans the end of the prompt and the start of the response, and counts as response"
GLUED = (
    "whose response follows the prompt without a space, as stored (--data_format question_answer or a chat template "
    "separates questions and answers)"
)
UNANSWERED = "that end with a question and train only up to their last answer"


@dataclass(slots=True)  # not frozen, which would make a row's records three times as slow
class ReadSample:
    """A sample before it is tokenized.

    where: names the row in errors.
    pieces: its text; the first `prompts` of them are the prompt, or a whole conversation; each other one is an answer
        to it.
    row_id: of the row.
    carried: of `RowKind.carried`.
    noted: what the report counts it as, once under each.
    media: of the prompt, in the order of their places.
    prompt_text, chats, is_empty: of prompts: their text as the dataset gives it, the columns with their messages, and
        whether they ask nothing.
    """

    where: str
    pieces: list[TextPiece]
    prompts: int = 1
    row_id: int = 0
    carried: dict[str, Any] = field(default_factory=dict)
    noted: tuple[str, ...] = ()
    media: tuple[RowMedium, ...] = ()
    prompt_text: str = ""
    chats: dict[str, list[Message]] = field(default_factory=dict)
    is_empty: bool = False


@dataclass(frozen=True)
class Making:
    """reader: of the form of responses; None where each is one run of tokens.
    media: reads those of the rows; None where the model reads text alone.
    """

    flags: RowArguments
    texts: TextTokenizer
    counts: Counts
    reader: FormReader | None
    media: ReadsMedia | None

    def form_of(self, texts: Sequence[Sequence[int]], where: str, loss: Sequence[bool] | None = None) -> RowForm | None:
        """See `FormReader`."""
        return None if self.reader is None else self.reader.form_of(texts, where, loss)

    def spans(self, sample: ReadSample, ids: Ids, others: Sequence[Ids] = ()) -> tuple[MediaSpan, ...]:
        """Spans of a row's media in its tokens `ids`; none may stand in `others`."""
        if self.media is None:
            return ()
        for each in others:
            self.media.spans(each, (), sample.where)
        return self.media.spans(ids, sample.media, sample.where)

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
    def make(self, making: Making, sample: ReadSample, ids: list[Ids]) -> Row:
        """The row. ids: of the sample's pieces. Raises Dropped, TooLong, ThreestepError."""

    @abstractmethod
    def document(self, row: Any) -> Document:
        """The row as a policy reads it."""


# From samples to text and ids.


@dataclass(frozen=True)
class PlainText:
    """Texts as the dataset gives them (`--prompt_style human_assistant`)."""

    _texts: TextTokenizer
    _raw: PromptRawDataset
    _rows: RowArguments
    _weighs_messages: bool
    _keeps_answers: bool  # of conversations that end with a question

    def read(self, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        """The sample. Raises Dropped, BadConversation, and ThreestepError for a mistake."""
        if not responses:
            return self._read_prompt(sample, where)
        self._check_weights(sample, where)
        answered = self._last_answer(sample, where) if self._weighs_messages else None
        prompt, texts = answered or read_texts(self._raw, responses, sample, where)
        turns = [TextPiece(text, True, True, is_end=True) for text in texts]
        return ReadSample(where, [TextPiece(prompt), *turns], noted=() if answered is None else (UNANSWERED,))

    def _read_prompt(self, sample: Any, where: str) -> ReadSample:
        text, _ = read_texts(self._raw, (), sample, where)
        given = self._raw.get_prompt_messages(sample)
        messages = given or messages_of_text(text)
        read = ReadSample(where, [TextPiece(text)], prompt_text=text)
        if {RAW_CHAT, MESSAGES} & set(self._rows.return_columns):
            bare, _ = split_weights(checked_messages(messages, where), where)
            read.chats = chats_of(self._raw, bare, bool(given), where)
        read.is_empty = asks_nothing(messages)
        return read

    def _last_answer(self, sample: Any, where: str) -> tuple[str, list[str]] | None:
        """The last answer of a conversation that goes on behind it, and its prompt; None of every other sample. Raises
        Dropped where its weight takes the loss off it, or it is blank."""
        found = self._raw.get_messages(sample) if self._keeps_answers else None
        if not found or self._raw.get_chosen_messages(sample) is not None:
            return None
        messages, weights = split_weights(checked_messages(found, where), where)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not places or messages[-1]["role"] == "assistant":
            return None
        last = places[-1]
        if weights[last] is False:
            raise Dropped("no_turn_to_train")
        text = response_text(messages[last : last + 1], where)
        if not text.strip():
            raise Dropped("empty_response")
        return prompt_text(messages[:last], self._raw.get_tools(sample), where), [text]

    def _check_weights(self, sample: Any, where: str) -> None:
        """Raise Dropped where the weight of the response, the messages after the prompt's, takes the loss off it."""
        messages = got(self._raw, "get_messages", sample, where)
        if messages is None or not has_weights(messages):
            return
        messages = checked_messages(messages, where)
        _, weights = split_weights(messages, where)
        if self._weighs_messages:
            check_weights(messages, weights, self._rows.loss_on, where)
        begin = len(self._raw.get_prompt_messages(sample) or ())
        trained = {weight for message, weight in zip(messages[begin:], weights[begin:], strict=True)
                   if message["role"] == "assistant"}  # fmt: skip
        if trained == {False}:
            raise Dropped("no_turn_to_train")
        if False in trained and self._weighs_messages:
            raise BadConversation(
                f"{where}: the messages of the response have different weights, but in plain text they are one; "
                "use --prompt_style chat_template"
            )

    def encode(self, samples: Sequence[ReadSample]) -> list[EncodedParts]:
        prompts = [sample.pieces[0].text for sample in samples]
        if all(len(sample.pieces) == 1 for sample in samples):
            return [EncodedParts([ids]) for ids in self._texts.encode_prompts(prompts)]
        return self._texts.encode_sentences(prompts, [[piece.text for piece in each.pieces[1:]] for each in samples])


@dataclass(frozen=True)
class ChatText:
    """Messages under a chat template (`--prompt_style chat_template`); a dataset's texts become messages.

    weighed_loss: `--loss_on` where the loss follows the weights of messages.
    """

    texts: ChatTokenizer
    raw: PromptRawDataset
    media: ReadsMedia | None
    train_turns: str = "all"
    return_raw_chat: bool = False
    weighed_loss: str | None = None

    def encode(self, samples: Sequence[ReadSample]) -> list[EncodedParts]:
        return self.texts.encode([sample.pieces for sample in samples], [sample.prompts for sample in samples])

    def conversation(self, messages: Any, sample: Any, where: str) -> tuple[Conversation, tuple[RowMedium, ...]]:
        """The messages, checked and with their media in place, and those media."""
        reads_media = self.media is not None
        bare, weights = split_weights(checked_messages(messages, where, reads_media, self.raw.unread_images), where)
        if self.weighed_loss is not None:
            check_weights(bare, weights, self.weighed_loss, where)
        media: tuple[RowMedium, ...] = ()
        if self.media is not None:
            values = self.raw.get_images(sample) or ()
            bare, media = self.media.placed(bare, values, self.raw.images_folder, where)
        conversation = Conversation(
            bare,
            where,
            checked_tools(self.raw.get_tools(sample), where),
            self.raw.get_chat_template_kwargs(sample) or {},
            frozenset(place for place, weight in enumerate(weights) if weight is False),
        )
        return conversation, media

    def expanded(self, pieces: list[TextPiece], media: Sequence[RowMedium], where: str) -> list[TextPiece]:
        """The pieces, with the tokens of the media in their places."""
        return pieces if self.media is None else self.media.expanded(pieces, media, where)


def check_media_are_read(raw: PromptRawDataset, sample: Any, media: ReadsMedia | None, where: str) -> None:
    """Raise BadConversation for media of a sample that no chat template puts in their places. media: the run's
    reader."""
    if not raw.get_images(sample):
        return
    if media is None:
        raise BadConversation(f"{where}: get_images returned images, but {raw.unread_images}; leave such rows out")
    raise BadConversation(
        f"{where}: the row has images, which only a chat template can place; use --prompt_style chat_template"
    )


def chats_of(raw: PromptRawDataset, messages: list[Message], are_given: bool, where: str) -> dict[str, list[Message]]:
    """The columns with a prompt's messages. are_given: by the dataset, and not made of its text."""
    chat = checked_json(raw, "get_prompt_messages", messages, where)
    return {RAW_CHAT: chat, MESSAGES: chat} if are_given else {RAW_CHAT: chat}


def asks_nothing(messages: Sequence[Message]) -> bool:
    """True for messages without text, media and calls, whatever the system prompt before them."""
    asking = [message for message in messages if message["role"] not in ("system", "developer")]
    return not any(message.get("tool_calls") or _holds_something(message["content"]) for message in asking or messages)


def _holds_something(content: Any) -> bool:
    if isinstance(content, list):
        return any(str(part.get("text") or "").strip() or part.get("type") != "text" for part in content)
    return bool(str(content or "").strip())


def is_glued(sample: ReadSample) -> bool:
    """True if a plain response begins with a letter or digit right after the prompt's last character."""
    prompt, response = sample.pieces[0].text, sample.pieces[-1].text
    return bool(prompt) and not prompt[-1].isspace() and response[0].isascii() and response[0].isalnum()
