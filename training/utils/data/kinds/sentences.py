"""Sentences: a prompt with its chosen response, or a whole conversation, of which some tokens carry loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.contracts.rows import Row, SentenceRow
from training.utils.data.chat.chat import fit_conversation, joined
from training.utils.data.kinds.kind import Making, RowKind, Waiting
from training.utils.data.kinds.samples import got, read_texts
from training.utils.data.kinds.strategies import UNANSWERED, ReadSample
from training.utils.data.rows.documents import sentence_document
from training.utils.data.rows.tokenize import Dropped, Ids, TextTokenizer
from training.utils.data.sources.formats.messages import BadConversation, messages_of_text, response_message

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.data.chat.arguments import ChatArguments
    from training.utils.data.kinds.strategies import ChatText
    from training.utils.data.rows.arguments import RowArguments

UNWRITTEN = "whose text beside a call the chat template leaves out"
OTHER_PROMPT = "learnt without the end of the generation prompt, which the chat template does not write before answers"


class Sentences(RowKind):
    """`SentenceRow`s, for supervised fine-tuning."""

    name = "sentences"
    phase = 1
    key = "1"
    record = SentenceRow
    responses = ("chosen",)
    dropped_marks = {False: "marked_bad"}
    needs_pad = False
    weighs_messages = True

    def parts(self, rows: RowArguments, texts: TextTokenizer) -> dict[str, str]:
        return {**super().parts(rows, texts), "loss_on": rows.loss_on}

    def read_chat(self, chat: ChatText, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        messages, train_turns = got(chat.raw, "get_messages", sample, where), chat.train_turns
        if messages is None:
            # The dataset offers its response to learn from, not the turns before it.
            prompt, (response,) = read_texts(chat.raw, responses, sample, where)
            if not prompt:
                if chat.media is not None and chat.raw.get_images(sample):
                    raise BadConversation(f"{where}: expected a prompt, which the images belong to, got a text alone")
                pieces = chat.texts.text(response)
                return ReadSample(where, pieces, len(pieces))
            messages, train_turns = [*messages_of_text(prompt), response_message(prompt, response)], "last"
        conversation, media = chat.conversation(messages, sample, where)
        if all(message["role"] != "assistant" for message in conversation.messages):
            raise Dropped("no_assistant_turn")
        conversation, noted = chat.texts.unread(conversation).of_answer(conversation, train_turns == "all")
        found = chat.texts.sentence(conversation, train_turns)
        if found is None:
            raise Dropped("no_assistant_turn")
        pieces = found
        if not any(piece.carries_loss for piece in pieces):
            raise Dropped("no_turn_to_train")
        if conversation.messages[-1]["role"] != "assistant":
            noted = (*noted, UNANSWERED)
        elif not chat.texts.follows_its_prompt(conversation, pieces):
            noted = (*noted, OTHER_PROMPT)
        if chat.texts.leaves_out_text(conversation):
            noted = (*noted, UNWRITTEN)
        pieces = chat.expanded(pieces, media, where)
        return ReadSample(where, pieces, len(pieces), noted=noted, media=media)

    def make(self, making: Making, one: Waiting, ids: list[Ids]) -> Row:
        flags, whole = making.flags, joined(one.sample.pieces, ids)
        spans = making.spans(one, whole.ids)
        form = making.form_of([whole.ids], one.sample.where, whole.loss)
        conversation, was_cut = fit_conversation(whole, flags.max_seq_len, flags.truncation)
        if was_cut and spans:
            placed = replace(whole, ids=list(range(len(whole.ids))))
            fitted, _ = fit_conversation(placed, flags.max_seq_len, flags.truncation)
            spans = making.after_cut(spans, fitted.ids)
        if was_cut and form is not None and making.reader is not None:
            making.reader.check_cut([conversation.ids], conversation.loss, may_end_open=True)
        making.counts.truncated += was_cut
        if not was_cut:
            learnt = zip(one.sample.pieces, ids, strict=True)
            making.count_ends((piece, piece_ids) for piece, piece_ids in learnt if piece.carries_loss)
        loss_mask = np.array(conversation.loss, bool)
        if flags.loss_on == "conversation":
            loss_mask[:] = True
            for span in spans:
                loss_mask[span.begin : span.end] = False
        loss_mask[0] = False
        return self.record(one.row_id, np.array(conversation.ids, np.int32), loss_mask, form, spans, **one.carried)

    def document(self, row: SentenceRow) -> Document:
        return sentence_document(row)

    def loss_in_words(self, rows: RowArguments, chat: ChatArguments) -> str:
        if rows.loss_on == "conversation":
            return "all but the first of a row (--loss_on conversation)"
        turns = "last response" if chat.train_turns == "last" else "responses"
        return f"the {turns} and the tokens that end them; prompts and what a template writes carry none"
