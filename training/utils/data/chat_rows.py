"""The raw rows of one source become the tokenized rows of one phase, under a chat template.

The counterpart of `row_makers.RowMaker` for `--prompt_style chat_template`. A row is taken as messages where its
dataset has them, otherwise its texts become messages. Knows nothing of splits, files or the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.utils.data.arguments import DataArguments
from training.utils.data.chat import ChatTokenizer, Piece, fit_conversation, joined
from training.utils.data.conversations import (
    BadConversation,
    Conversation,
    Message,
    checked_messages,
    checked_tools,
    messages_of_text,
    response_message,
)
from training.utils.data.parallel_thinking import ParallelCheck
from training.utils.data.phases import PromptRow, ResponsesRow, Row, SentenceRow
from training.utils.data.reports import Counts
from training.utils.data.row_makers import (
    TEXTS_PER_CALL,
    Carried,
    Dropped,
    checked_json,
    columns_on_request,
    fit_prompt,
    read_carried,
    read_margins,
    read_ranked_texts,
    read_response,
    read_text,
    too_long,
)
from training.utils.data.sources import Source
from training.utils.data.tokenize import Ids, TooLong, fit_sentences
from training.utils.layout.parallel import MalformedBlocks
from training.utils.run.errors import ThreestepError


@dataclass(frozen=True)
class _Read:
    """What a row is before it is tokenized. `prompts`: how many of the pieces are the prompt (phases 2 and 3);
    `margins`: of phase 2; the rest: of phase 3."""

    row_id: int
    where: str
    pieces: list[Piece]
    prompts: int = 0
    margins: np.ndarray | None = None
    prompt_text: str = ""
    raw_chat: list[Message] | None = None
    carried: Carried | None = None


class ChatRowMaker:
    """Turns the raw rows of one source into records of one phase, a few hundred conversations at a time."""

    def __init__(self, phase: int, data: DataArguments, chat: ChatTokenizer, source: Source, counts: Counts) -> None:
        self._data = data
        self._chat = chat
        self._source = source
        self._raw = source.raw
        self._counts = counts
        self._parallel = ParallelCheck(data, chat.texts.parallel_tags, counts.parallel)
        self._read: Callable[[Any, int, str], _Read | Dropped] = {
            1: self._read_conversation,
            2: self._read_responses,
            3: self._read_prompt,
        }[phase]
        makers: dict[int, Callable[[_Read, list[Ids]], Row | Dropped]] = {
            1: self._sentence,
            2: self._responses,
            3: self._prompt,
        }
        self._make = makers[phase]

    def rows(self, rows: Sequence[Any], indices: Iterable[int], first_id: int) -> Iterator[Row]:
        waiting: list[_Read] = []
        for index in indices:
            sample, where = rows[int(index)], f"dataset '{self._source.name}', row {int(index)}"
            try:
                read = self._read(sample, first_id + int(index), where)
            except BadConversation as error:
                read = self._bad(error)
            if isinstance(read, Dropped):
                self._drop(read.reason)
                continue
            waiting.append(read)
            if len(waiting) == TEXTS_PER_CALL:
                yield from self._made(waiting)
                waiting = []
        if waiting:
            yield from self._made(waiting)

    def _made(self, waiting: Sequence[_Read]) -> Iterator[Row]:
        encoded = self._chat.encode([read.pieces for read in waiting], [read.where for read in waiting])
        for read, ids in zip(waiting, encoded, strict=True):
            made = self._bad(ids) if isinstance(ids, BadConversation) else self._make(read, ids)
            if isinstance(made, Dropped):
                self._drop(made.reason)
            else:
                yield made

    def _drop(self, reason: str) -> None:
        self._counts.dropped[reason] += 1

    def _bad(self, error: BadConversation) -> Dropped:
        if self._data.bad_conversations == "error":
            raise error
        return Dropped("bad_conversation")

    # Reading: what a phase takes from a sample, or why it is left out.

    def _conversation(self, messages: Any, sample: Any, where: str) -> Conversation:
        return Conversation(
            checked_messages(messages, where),
            where,
            checked_tools(self._raw.get_tools(sample), where),
            self._raw.get_chat_template_kwargs(sample) or {},
        )

    def _read_conversation(self, sample: Any, row_id: int, where: str) -> _Read | Dropped:
        messages, train_turns = self._raw.get_messages(sample), self._data.train_turns
        if messages is None:  # text: the response is what the dataset offers to learn, not the turns before it
            train_turns = "last"
            prompt = read_text(self._raw, "get_prompt", sample, where)
            if prompt is None:
                return Dropped("no_prompt")
            response = read_response(self._raw, sample, prompt, "chosen", where)
            if isinstance(response, Dropped):
                return response
            messages = [*messages_of_text(prompt), response_message(response)]
        conversation = self._conversation(messages, sample, where)
        if all(message["role"] != "assistant" for message in conversation.messages):
            return Dropped("no_assistant_turn")
        pieces = self._chat.sentence(conversation, train_turns)
        return Dropped("no_assistant_turn") if pieces is None else _Read(row_id, where, pieces)

    def _read_responses(self, sample: Any, row_id: int, where: str) -> _Read | Dropped:
        given = self._raw.get_prompt_messages(sample)
        if given is None:
            prompt = read_text(self._raw, "get_prompt", sample, where)
            if prompt is None:
                return Dropped("no_prompt")
            responses = read_ranked_texts(self._raw, sample, prompt, where)
            if isinstance(responses, Dropped):
                return responses
            messages, answers = messages_of_text(prompt), [response_message(response) for response in responses]
        else:
            messages = list(given)
            found = self._response_messages(sample, where)
            if isinstance(found, Dropped):
                return found
            answers = found
        found_pieces = self._chat.responses(self._conversation(messages, sample, where), answers)
        if found_pieces is None:
            return Dropped("prompt_no_prefix_of_the_response")
        prompt_pieces, answer_pieces = found_pieces
        margins = read_margins(self._raw, sample, len(answers), where)
        return _Read(row_id, where, [*prompt_pieces, *answer_pieces], len(prompt_pieces), margins=margins)

    def _response_messages(self, sample: Any, where: str) -> list[Message] | Dropped:
        """The chosen and the rejected message."""
        answers = []
        for kind in ("chosen", "rejected"):
            given = getattr(self._raw, f"get_{kind}_messages")(sample)
            if given is None:
                return Dropped(f"no_{kind}")
            messages = checked_messages(given, f"{where}, {kind}")
            if len(messages) != 1:
                return Dropped("response_of_several_messages")
            if messages[0]["role"] != "assistant":
                raise BadConversation(
                    f"{where}, {kind}: expected a message of the assistant's, got one of role '{messages[0]['role']}'"
                )
            if not messages[0].get("tool_calls") and not str(messages[0]["content"]).strip():
                return Dropped("empty_response")
            answers += messages
        return answers

    def _read_prompt(self, sample: Any, row_id: int, where: str) -> _Read | Dropped:
        messages, text = self._raw.get_prompt_messages(sample), None
        if messages is None:
            text = read_text(self._raw, "get_prompt", sample, where)
            if text is None:
                return Dropped("no_prompt")
            messages = messages_of_text(text)
        conversation = self._conversation(messages, sample, where)
        pieces = self._chat.prompt(conversation)
        if text is None:
            text = _text_of(pieces)
        raw_chat = None
        if self._data.return_raw_chat:
            raw_chat = checked_json(self._raw, "get_prompt_messages", conversation.messages, where)
        carried = read_carried(self._raw, sample, self._source.name, where)
        return _Read(row_id, where, pieces, len(pieces), prompt_text=text, raw_chat=raw_chat, carried=carried)

    # Making: lengths, records.

    def _sentence(self, read: _Read, ids: list[Ids]) -> Row | Dropped:
        whole = joined(read.pieces, ids)
        try:
            tags = self._parallel.tags_of([whole.ids], read.where, whole.loss)
        except MalformedBlocks:
            return Dropped("malformed_parallel")
        try:
            fitted = fit_conversation(whole, self._data.max_seq_len, self._data.truncation)
        except TooLong as long:
            raise self._too_long(read, long) from None
        if isinstance(fitted, str):
            return Dropped(fitted)
        conversation, was_cut = fitted
        if was_cut and tags and not self._parallel.is_whole([conversation.ids], conversation.loss, may_end_open=True):
            return Dropped("cut_inside_a_block")
        self._counts.truncated += was_cut
        loss_mask = np.array(conversation.loss, bool)
        if self._data.loss_on == "conversation":
            loss_mask[:] = True
        loss_mask[0] = False
        return SentenceRow(read.row_id, np.array(conversation.ids, np.int32), loss_mask, tags)

    def _responses(self, read: _Read, ids: list[Ids]) -> Row | Dropped:
        prompt_ids = [i for own in ids[: read.prompts] for i in own]
        if not prompt_ids:
            return Dropped("empty_prompt")
        data = self._data
        try:
            tags = self._parallel.tags_of(ids[read.prompts :], read.where)
        except MalformedBlocks:
            return Dropped("malformed_parallel")
        try:
            fitted = fit_sentences(
                prompt_ids, ids[read.prompts :], data.max_seq_len, data.truncation, self._chat.texts.end_id
            )
        except TooLong as long:
            raise self._too_long(read, long) from None
        if fitted.dropped:
            return Dropped(fitted.dropped)
        self._counts.truncated += fitted.truncated
        if len({tuple(own) for own in fitted.response_ids}) < len(fitted.response_ids):
            return Dropped("identical_responses")
        if tags and not self._parallel.is_whole(fitted.response_ids):
            return Dropped("cut_inside_a_block")
        responses = tuple(np.array(own, np.int32) for own in fitted.response_ids)
        return ResponsesRow(read.row_id, np.array(fitted.prompt_ids, np.int32), responses, read.margins, tags)

    def _prompt(self, read: _Read, ids: list[Ids]) -> Row | Dropped:
        whole = [i for own in ids for i in own]
        if not whole:
            return Dropped("empty_prompt")
        cut = fit_prompt(whole, self._source, read.row_id, self._data)
        if isinstance(cut, Dropped):
            return cut
        self._counts.truncated += len(cut) < len(whole)
        assert read.carried is not None
        on_request = columns_on_request(self._data, cut, read.raw_chat, _text_of(read.pieces))
        columns = {**read.carried.columns, **on_request}
        self._counts.columns.update(columns.keys())
        return PromptRow(read.row_id, np.array(cut[::-1], np.int32), read.prompt_text, read.carried.reference, columns)

    def _too_long(self, read: _Read, long: TooLong) -> ThreestepError:
        return too_long(self._source, read.row_id, long, self._data)


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
