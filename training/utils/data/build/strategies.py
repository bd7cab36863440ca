"""The two ways from a sample to pieces of text and their ids: plain text, and a chat template.

Both read samples one at a time (`read`; raises Dropped, BadConversation, and ThreestepError for a mistake) and encode
many at a time (`encode`: the ids of each piece, or the sample's error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.data.build.samples import checked_json, read_texts
from training.utils.data.chat.chat import ChatTokenizer, TextPiece
from training.utils.data.rows.tokenize import Dropped, Ids, TextTokenizer
from training.utils.data.sources.formats.messages import (
    BadConversation,
    Conversation,
    Message,
    checked_messages,
    checked_tools,
    messages_of_text,
    response_message,
)
from training.utils.data.sources.formats.weights import check_weights, has_weights, split_weights

if TYPE_CHECKING:
    from training.utils.contracts.media import ReadsMedia
    from training.utils.data.sources.raw_dataset import PromptRawDataset
    from training.utils.images.data.row_pictures import RowPicture


@dataclass(frozen=True)
class ReadSample:
    """A sample before it is tokenized.

    where: names the row in errors.
    pieces: its text; the first `prompts` of them are the prompt.
    prompt_text: phase 3, the prompt as the dataset gives it.
    raw_chat: phase 3, the prompt's messages with `--return_raw_chat`.
    noted: names under which the report counts it.
    images: of the prompt, in the order of their places.
    """

    where: str
    pieces: list[TextPiece]
    prompts: int = 1
    prompt_text: str = ""
    raw_chat: list[Message] | None = None
    noted: str | None = None
    images: tuple[RowPicture, ...] = ()


OTHER_PROMPT = "learnt without the end of the generation prompt, which the chat template does not write before answers"

GLUED = (
    "whose response follows the prompt without a blank, as stored (--data_format question_answer or a chat template "
    "sets questions and answers apart)"
)


def is_glued(sample: ReadSample) -> bool:
    """True if a plain response begins with a letter or digit right after the prompt's last character."""
    prompt, response = sample.pieces[0].text, sample.pieces[-1].text
    return bool(prompt) and not prompt[-1].isspace() and response[0].isascii() and response[0].isalnum()


@dataclass(frozen=True)
class PlainText:
    """Texts as the dataset gives them (`--prompt_style human_assistant`)."""

    _phase: int
    _texts: TextTokenizer
    _raw: PromptRawDataset
    _return_raw_chat: bool
    _loss_on: str

    def read(self, sample: Any, where: str) -> ReadSample:
        if self._phase != 3:
            self._check_weights(sample, where)
        prompt, responses = read_texts(self._raw, self._phase, sample, where)
        messages = None
        if self._phase == 3 and self._return_raw_chat:
            messages = checked_messages(self._raw.get_prompt_messages(sample) or messages_of_text(prompt), where)
            messages, _ = split_weights(messages, where)
            checked_json(self._raw, "get_prompt_messages", messages, where)
        turns = [TextPiece(response, True, self._phase == 1, is_end=True) for response in responses]
        return ReadSample(where, [TextPiece(prompt), *turns], prompt_text=prompt, raw_chat=messages)

    def _check_weights(self, sample: Any, where: str) -> None:
        """Raise Dropped where the weight of the response, the messages after the prompt's, takes the loss off it."""
        messages = self._raw.get_messages(sample)
        if messages is None or not has_weights(messages):
            return
        messages = checked_messages(messages, where)
        _, weights = split_weights(messages, where)
        if self._phase == 1:
            check_weights(messages, weights, self._loss_on, where)
        begin = len(self._raw.get_prompt_messages(sample) or ())
        trained = {weight for message, weight in zip(messages[begin:], weights[begin:], strict=True)
                   if message["role"] == "assistant"}  # fmt: skip
        if trained == {False}:
            raise Dropped("no_turn_to_train")
        if False in trained and self._phase == 1:
            raise BadConversation(
                f"{where}: the messages of the response have different weights, and as plain text it is one response; "
                "use --prompt_style chat_template"
            )

    def encode(self, samples: Sequence[ReadSample]) -> list[list[Ids]]:
        encoded = [[ids] for ids in self._texts.encode_prompts([sample.pieces[0].text for sample in samples])]
        responses = [(place, piece.text) for place, sample in enumerate(samples) for piece in sample.pieces[1:]]
        response_ids = self._texts.encode_responses(
            [samples[place].pieces[0].text for place, _ in responses],
            [encoded[place][0] for place, _ in responses],
            [text for _, text in responses],
        )
        for (place, _), ids in zip(responses, response_ids, strict=True):
            encoded[place].append(ids)
        return encoded


class ChatText:
    """Messages under a chat template (`--prompt_style chat_template`); a dataset's texts become messages."""

    def __init__(
        self,
        phase: int,
        texts: ChatTokenizer,
        raw: PromptRawDataset,
        train_turns: str,
        return_raw_chat: bool,
        loss_on: str,
        images: ReadsMedia | None = None,
    ) -> None:
        self._phase = phase
        self._texts = texts
        self._raw = raw
        self._loss_on = loss_on
        self._train_turns = train_turns
        self._return_raw_chat = return_raw_chat
        self._images = images
        self.read = {1: self._read_conversation, 2: self._read_responses, 3: self._read_prompt}[phase]

    def encode(self, samples: Sequence[ReadSample]) -> list[list[Ids] | BadConversation]:
        return self._texts.encode([sample.pieces for sample in samples], [sample.where for sample in samples])

    def _conversation(self, messages: Any, sample: Any, where: str) -> tuple[Conversation, tuple[RowPicture, ...]]:
        """The messages, checked and with their images in place, and those images."""
        reads_images = self._images is not None
        bare, weights = split_weights(checked_messages(messages, where, reads_images, self._raw.unread_images), where)
        if self._phase == 1:
            check_weights(bare, weights, self._loss_on, where)
        images: tuple[RowPicture, ...] = ()
        if self._images is not None:
            values = self._raw.get_images(sample) or ()
            bare, images = self._images.placed(bare, values, self._raw.images_folder, where)
        conversation = Conversation(
            bare,
            where,
            checked_tools(self._raw.get_tools(sample), where),
            self._raw.get_chat_template_kwargs(sample) or {},
            frozenset(place for place, weight in enumerate(weights) if weight is False),
        )
        return conversation, images

    def _expanded(self, pieces: list[TextPiece], images: Sequence[RowPicture], where: str) -> list[TextPiece]:
        return pieces if self._images is None else self._images.expanded(pieces, images, where)

    def _read_conversation(self, sample: Any, where: str) -> ReadSample:
        messages, train_turns = self._raw.get_messages(sample), self._train_turns
        if messages is None:
            # The dataset offers its response to learn from, not the turns before it.
            prompt, (response,) = read_texts(self._raw, 1, sample, where)
            if not prompt:
                if self._images is not None and self._raw.get_images(sample):
                    raise BadConversation(f"{where}: expected a prompt, which the images belong to, got a text alone")
                return ReadSample(where, self._texts.text(response))
            messages, train_turns = [*messages_of_text(prompt), response_message(prompt, response)], "last"
        conversation, images = self._conversation(messages, sample, where)
        if all(message["role"] != "assistant" for message in conversation.messages):
            raise Dropped("no_assistant_turn")
        pieces = self._texts.sentence(conversation, train_turns)
        if pieces is None:
            raise Dropped("no_assistant_turn")
        if not any(piece.carries_loss for piece in pieces):
            raise Dropped("no_turn_to_train")
        noted = None if self._texts.follows_its_prompt(conversation, pieces) else OTHER_PROMPT
        return ReadSample(where, self._expanded(pieces, images, where), noted=noted, images=images)

    def _read_responses(self, sample: Any, where: str) -> ReadSample:
        messages = self._raw.get_prompt_messages(sample)
        if messages is None:
            prompt, responses = read_texts(self._raw, 2, sample, where)
            messages = messages_of_text(prompt)
            answers = [response_message(prompt, response) for response in responses]
        else:
            answers = self._response_messages(sample, where)
        conversation, images = self._conversation(list(messages), sample, where)
        pieces = self._texts.responses(conversation, answers)
        if pieces is None:
            raise Dropped("prompt_no_prefix_of_the_response")
        prompt_pieces, answer_pieces = pieces
        prompt_pieces = self._expanded(prompt_pieces, images, where)
        return ReadSample(where, [*prompt_pieces, *answer_pieces], len(prompt_pieces), images=images)

    def _response_messages(self, sample: Any, where: str) -> list[Message]:
        """The chosen and the rejected message."""
        answers = []
        for kind in ("chosen", "rejected"):
            given = getattr(self._raw, f"get_{kind}_messages")(sample)
            if given is None:
                raise Dropped(f"no_{kind}")
            messages, weights = split_weights(checked_messages(given, f"{where}, {kind}"), f"{where}, {kind}")
            if len(messages) != 1:
                raise Dropped("response_of_several_messages")
            if messages[0]["role"] != "assistant":
                raise BadConversation(
                    f"{where}, {kind}: expected a message of the assistant, got one of role '{messages[0]['role']}'"
                )
            if not messages[0].get("tool_calls") and not str(messages[0]["content"]).strip():
                raise Dropped("empty_response")
            if kind == "chosen" and weights == [False]:
                raise Dropped("no_turn_to_train")
            answers += messages
        return answers

    def _read_prompt(self, sample: Any, where: str) -> ReadSample:
        messages, text = self._raw.get_prompt_messages(sample), None
        if messages is None:
            text, _ = read_texts(self._raw, 3, sample, where)
            messages = messages_of_text(text)
        conversation, images = self._conversation(messages, sample, where)
        pieces = self._texts.prompt(conversation)
        if text is None:
            text = "".join(piece.text for piece in pieces)
        raw_chat = None
        if self._return_raw_chat:
            raw_chat = checked_json(self._raw, "get_prompt_messages", conversation.messages, where)
        pieces = self._expanded(pieces, images, where)
        return ReadSample(where, pieces, len(pieces), text, raw_chat, images=images)
