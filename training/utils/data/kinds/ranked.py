"""Ranked responses, a prompt with two or more responses to it, best first; and responses that are marked one by one,
good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from training.utils.contracts.rows import MarkedRow, ResponsesRow, Row
from training.utils.data.kinds.kind import Making, RowKind, Waiting
from training.utils.data.kinds.samples import got, read_margins, read_texts
from training.utils.data.kinds.strategies import ReadSample
from training.utils.data.rows.documents import responses_document
from training.utils.data.rows.tokenize import Dropped, Ids, fit_sentences
from training.utils.data.sources.formats.messages import (
    BadConversation,
    Conversation,
    Message,
    checked_messages,
    messages_of_text,
    response_message,
    split_weights,
)

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.data.kinds.strategies import ChatText, ReadSample
    from training.utils.data.sources.raw_dataset import PromptRawDataset


class Ranked(RowKind):
    """`ResponsesRow`s, for the reward model and preference losses."""

    name = "ranked"
    phase = 2
    key = "2"
    record = ResponsesRow
    responses: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    dropped_marks = {True: "unpaired", False: "unpaired"}
    columns: ClassVar[tuple[str, ...]] = ("margin",)
    hints = {
        "unpaired": "responses that are marked one by one are no pairs; `threestep dpo --loss_type kto` (or bco) "
        "trains on all of them, step 1 on the good ones",
        "no_rejected": "a pair needs a rejected response (of files, --rejected_column names it)",
    }
    loss = "the responses, for DPO; a reward model is scored at the last token of each"

    def read_chat(self, chat: ChatText, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        messages = got(chat.raw, "get_prompt_messages", sample, where)
        if messages is None:
            prompt, texts = read_texts(chat.raw, responses, sample, where)
            messages = messages_of_text(prompt)
            answers = [response_message(prompt, text) for text in texts]
        else:
            answers = [self._answer(chat.raw, kind, sample, f"{where}, {kind}") for kind in responses]
        conversation, media = chat.conversation(list(messages), sample, where)
        conversation, answers, noted = _with_reasoning(chat, conversation, answers)
        pieces = chat.texts.responses(conversation, answers)
        if pieces is None:
            raise Dropped("prompt_no_prefix_of_the_response")
        prompt_pieces, answer_pieces = pieces
        prompt_pieces = chat.expanded(prompt_pieces, media, where)
        return ReadSample(where, [*prompt_pieces, *answer_pieces], len(prompt_pieces), noted=noted, media=media)

    def _answer(self, raw: PromptRawDataset, kind: str, sample: Any, where: str) -> Message:
        given = getattr(raw, f"get_{kind}_messages")(sample)
        if given is None:
            raise Dropped(f"no_{kind}")
        messages, weights = split_weights(checked_messages(given, where), where)
        if len(messages) != 1:
            raise Dropped("response_of_several_messages")
        (answer,) = messages
        if answer["role"] != "assistant":
            raise BadConversation(f"{where}: expected a message of the assistant, got one of role '{answer['role']}'")
        if not answer.get("tool_calls") and not str(answer["content"]).strip():
            raise Dropped("empty_response")
        if kind == "chosen" and weights == [False]:
            raise Dropped("no_turn_to_train")
        return answer

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        return {"margins": read_margins(raw, sample, len(read.pieces) - read.prompts, read.where)}

    def make(self, making: Making, one: Waiting, ids: list[Ids]) -> Row:
        prompts = one.sample.prompts
        prompt_ids = [token for part in ids[:prompts] for token in part]
        spans = making.spans(one, prompt_ids, ids[prompts:])
        form = making.form_of(ids[prompts:], one.sample.where)
        most, truncation = making.flags.max_seq_len, making.flags.truncation
        places = list(range(len(prompt_ids)))  # cut as the tokens would be
        places, responses, was_cut = fit_sentences(places, ids[prompts:], most, truncation, end_id=making.texts.end_id)
        if was_cut:
            spans = making.after_cut(spans, places)
            prompt_ids = [prompt_ids[place] for place in places]
        making.counts.truncated += was_cut
        if not prompt_ids:  # only sentences are texts without a prompt
            raise Dropped("empty_prompt")
        if len({tuple(part) for part in responses}) < len(responses):
            raise Dropped("identical_responses")
        if form is not None and making.reader is not None:
            making.reader.check_cut(responses)
        if not was_cut:
            making.count_ends(zip(one.sample.pieces[prompts:], responses, strict=True))
        response_ids = tuple(np.array(part, np.int32) for part in responses)
        prompt = np.array(prompt_ids, np.int32)
        return self.record(one.row_id, prompt, response_ids, form=form, media=spans, **one.carried)

    def document(self, row: ResponsesRow) -> Document:
        return responses_document(row, are_targets=True)


def _with_reasoning(
    chat: ChatText, prompt: Conversation, answers: Sequence[Message]
) -> tuple[Conversation, list[Message], tuple[str, ...]]:
    """Prompt and answers with their reasoning where the template reads it, and notes for the report."""
    unread = chat.texts.unread(prompt)
    read, noted = unread.of_prompt(prompt)
    answered = [unread.of_answer(replace(prompt, messages=[*prompt.messages, answer])) for answer in answers]
    notes = dict.fromkeys([*noted, *(note for _, of_answer in answered for note in of_answer)])
    return read, [conversation.messages[-1] for conversation, _ in answered], tuple(notes)


class Marked(Ranked):
    """`MarkedRow`s, for preference losses on unpaired responses."""

    name = "marked"
    key = "2_marked"
    record = MarkedRow
    responses: ClassVar[tuple[str, ...]] = ("chosen",)
    dropped_marks = {None: "unmarked"}
    columns: ClassVar[tuple[str, ...]] = ()
    hints = {
        "unmarked": "each response needs a mark of its own, good or bad (of files, --label_column names the column); a "
        "pair is written as two rows"
    }
    loss = "the responses, good ones and bad ones"

    def responses_of(self, mark: bool | None) -> tuple[str, ...]:
        return ("chosen",) if mark else ("rejected",)

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        return {"is_good": raw.get_mark(sample)}
