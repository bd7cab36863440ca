"""The two ways from a sample to pieces of text and their ids: plain text, and a chat template.

Samples are read one at a time (`PlainText.read`, `RowKind.read_chat`) and encoded
many at a time (`encode`: the ids of each piece, or the sample's error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.data.chat.chat import ChatTokenizer, TextPiece
from training.utils.data.kinds.samples import checked_json, got, read_texts
from training.utils.data.rows.arguments import MESSAGES, RAW_CHAT
from training.utils.data.rows.tokenize import Dropped, EncodedParts, TextTokenizer
from training.utils.data.sources.formats.messages import (
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

if TYPE_CHECKING:
    from training.utils.contracts.media import ReadsMedia, RowMedium
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.data.sources.raw_dataset import PromptRawDataset


@dataclass(slots=True)  # not frozen, which would make a row's records three times as slow
class ReadSample:
    """A sample before it is tokenized.

    where: names the row in errors.
    pieces: its text; the first `prompts` of them are the prompt, or a whole conversation; each other one is an answer
        to it.
    prompt_text: the prompt as the dataset gives it.
    raw_chat: of prompts, their messages with `--return_columns raw_prompt` or `prompt_messages`.
    has_messages: the dataset has messages, of which `raw_chat` is not made.
    noted: what the report counts it as, once under each.
    media: of the prompt, in the order of their places.
    is_empty: of prompts: they ask nothing.
    """

    where: str
    pieces: list[TextPiece]
    prompts: int = 1
    prompt_text: str = ""
    raw_chat: list[Message] | None = None
    noted: tuple[str, ...] = ()
    media: tuple[RowMedium, ...] = ()
    has_messages: bool = False
    is_empty: bool = False


GLUED = (
    "whose response follows the prompt without a blank, as stored (--data_format question_answer or a chat template "
    "sets questions and answers apart)"
)


CROSSED = "in which a token holds the end of a prompt and the beginning of its response, and counts as the response's"


def asks_nothing(messages: Sequence[Message]) -> bool:
    """True for messages without text, media and calls, whatever the system prompt before them."""
    asking = [message for message in messages if message["role"] not in ("system", "developer")]
    return not any(message.get("tool_calls") or _holds_something(message["content"]) for message in asking or messages)


def _holds_something(content: Any) -> bool:
    if isinstance(content, list):
        return any(str(part.get("text") or "").strip() or part.get("type") != "text" for part in content)
    return bool(str(content or "").strip())


UNANSWERED = "that end with a question, learnt up to their last answer"


def is_glued(sample: ReadSample) -> bool:
    """True if a plain response begins with a letter or digit right after the prompt's last character."""
    prompt, response = sample.pieces[0].text, sample.pieces[-1].text
    return bool(prompt) and not prompt[-1].isspace() and response[0].isascii() and response[0].isalnum()


@dataclass(frozen=True)
class PlainText:
    """Texts as the dataset gives them (`--prompt_style human_assistant`)."""

    _texts: TextTokenizer
    _raw: PromptRawDataset
    _rows: RowArguments
    _weighs_messages: bool
    _keeps_answers: bool = True  # of conversations that end with a question

    def read(self, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        """The sample. Raises Dropped, BadConversation, and ThreestepError for a mistake."""
        if responses:
            self._check_weights(sample, where)
        answered = self._last_answer(sample, where) if responses and self._weighs_messages else None
        prompt, texts = answered or read_texts(self._raw, responses, sample, where)
        messages, has_messages = None, False
        if not responses and {RAW_CHAT, MESSAGES} & set(self._rows.return_columns):
            given = self._raw.get_prompt_messages(sample)
            has_messages = bool(given)
            messages = checked_messages(given or messages_of_text(prompt), where)
            messages, _ = split_weights(messages, where)
            checked_json(self._raw, "get_prompt_messages", messages, where)
        turns = [TextPiece(text, True, True, is_end=True) for text in texts]
        noted = () if answered is None else (UNANSWERED,)
        read = ReadSample(where, [TextPiece(prompt), *turns], prompt_text=prompt, raw_chat=messages, noted=noted)
        read.has_messages = has_messages
        if not responses:
            read.is_empty = asks_nothing(self._raw.get_prompt_messages(sample) or messages_of_text(prompt))
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
                f"{where}: the messages of the response have different weights, and as plain text it is one response; "
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
        raise BadConversation(f"{where}: get_images returned images, and {raw.unread_images}; leave such rows out")
    raise BadConversation(
        f"{where}: the row has images, whose places a chat template writes; use --prompt_style chat_template"
    )
