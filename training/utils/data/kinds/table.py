"""The kinds of rows, and the table of their names: how a sample becomes such a row, and how the row is laid out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from training.utils.contracts.rows import MarkedRow, PromptRow, ResponsesRow, Row, SentenceRow
from training.utils.data.formats.messages import (
    BadConversation,
    Message,
    checked_messages,
    messages_of_text,
    response_message,
    split_weights,
)
from training.utils.data.kinds.kind import UNANSWERED, ChatText, Making, ReadSample, RowKind, asks_nothing, chats_of
from training.utils.data.kinds.samples import got, read_carried, read_margins, read_texts
from training.utils.data.rows.arguments import FULL_PROMPT, MESSAGES, RAW_CHAT, RAW_IDS
from training.utils.data.rows.documents import prompt_document, responses_document, sentence_document
from training.utils.data.rows.tokenize import (
    Dropped,
    Ids,
    TextTokenizer,
    TooLong,
    cut_prompt,
    fit_conversation,
    fit_sentences,
)

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.data.raw_dataset import PromptRawDataset
    from training.utils.data.rows.arguments import RowArguments

EMPTY_PROMPT = "with an empty prompt, kept because an environment may supply one (--return_columns raw_prompt)"


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
                    raise BadConversation(f"{where}: expected a prompt for the images, got only plain text")
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
        pieces, notes = found
        if not any(piece.carries_loss for piece in pieces):
            raise Dropped("no_turn_to_train")
        if conversation.messages[-1]["role"] != "assistant":
            noted = (*noted, UNANSWERED)
        pieces, noted = chat.expanded(pieces, media, where), (*noted, *notes)
        return ReadSample(where, pieces, len(pieces), noted=noted, media=media)

    def make(self, making: Making, sample: ReadSample, ids: list[Ids]) -> Row:
        flags, whole, loss, last_turn = making.flags, Ids(), list[bool](), 0
        for piece, part in zip(sample.pieces, ids, strict=True):
            last_turn = len(whole) if piece.carries_loss else last_turn
            whole += part
            loss += [piece.carries_loss] * len(part)
        spans = making.spans(sample, whole)
        form = making.form_of([whole], sample.where, loss)
        last = sample.pieces[-1]
        if len(whole) > flags.max_seq_len and not last.is_turn and not last.text.strip():
            end = len(whole) - len(ids[-1])  # no model has to write the white space behind the last turn
            whole, loss = whole[:end], loss[:end]
        places = fit_conversation(loss, last_turn, flags.max_seq_len, flags.truncation)
        if len(places) < len(whole):
            whole, loss = [whole[place] for place in places], [loss[place] for place in places]
            spans = making.after_cut(spans, places)
            if form is not None and making.reader is not None:
                making.reader.check_cut([whole], loss, may_end_open=True)
            making.counts.truncated += 1
        else:
            learnt = zip(sample.pieces, ids, strict=True)
            making.count_ends((piece, piece_ids) for piece, piece_ids in learnt if piece.carries_loss)
        loss_mask = np.array(loss, bool)
        if flags.loss_on == "conversation":
            loss_mask[:] = True
            for span in spans:
                loss_mask[span.begin : span.end] = False
        loss_mask[0] = False
        return self.record(sample.row_id, np.array(whole, np.int32), loss_mask, form, spans, **sample.carried)

    def document(self, row: SentenceRow) -> Document:
        return sentence_document(row)


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
        "unpaired": "responses with individual labels do not form pairs; `threestep dpo --loss_type kto` (or bco) "
        "trains on all of them, and step 1 trains on the good ones",
        "no_rejected": "a pair needs a rejected response; for files, name its column with --rejected_column",
    }

    def read_chat(self, chat: ChatText, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        messages = got(chat.raw, "get_prompt_messages", sample, where)
        if messages is None:
            prompt, texts = read_texts(chat.raw, responses, sample, where)
            messages = messages_of_text(prompt)
            answers = [response_message(prompt, text) for text in texts]
        else:
            answers = [self._answer(chat.raw, kind, sample, f"{where}, {kind}") for kind in responses]
        asked, media = chat.conversation(list(messages), sample, where)
        unread = chat.texts.unread(asked)
        read, noted = unread.of_prompt(asked)
        answered = [unread.of_answer(replace(asked, messages=[*asked.messages, each])) for each in answers]
        notes = tuple(dict.fromkeys([*noted, *(note for _, of_answer in answered for note in of_answer)]))
        pieces = chat.texts.responses(read, [each.messages[-1] for each, _ in answered])
        if pieces is None:
            raise Dropped("prompt_no_prefix_of_the_response")
        prompt_pieces, answer_pieces = pieces
        prompt_pieces = chat.expanded(prompt_pieces, media, where)
        return ReadSample(where, [*prompt_pieces, *answer_pieces], len(prompt_pieces), noted=notes, media=media)

    def _answer(self, raw: PromptRawDataset, kind: str, sample: Any, where: str) -> Message:
        given = getattr(raw, f"get_{kind}_messages")(sample)
        if given is None:
            raise Dropped(f"no_{kind}")
        messages, weights = split_weights(checked_messages(given, where), where)
        if len(messages) != 1:
            raise Dropped("response_of_several_messages")
        (answer,) = messages
        if answer["role"] != "assistant":
            raise BadConversation(f"{where}: expected an assistant message, got one with the role '{answer['role']}'")
        if not answer.get("tool_calls") and not str(answer["content"]).strip():
            raise Dropped("empty_response")
        if kind == "chosen" and weights == [False]:
            raise Dropped("no_turn_to_train")
        return answer

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        return {"margins": read_margins(raw, sample, len(read.pieces) - read.prompts, read.where)}

    def make(self, making: Making, sample: ReadSample, ids: list[Ids]) -> Row:
        prompts = sample.prompts
        prompt_ids = [token for part in ids[:prompts] for token in part]
        spans = making.spans(sample, prompt_ids, ids[prompts:])
        form = making.form_of(ids[prompts:], sample.where)
        most, truncation = making.flags.max_seq_len, making.flags.truncation
        places, responses, was_cut = fit_sentences(
            len(prompt_ids), ids[prompts:], most, truncation, end_id=making.texts.end_id
        )
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
            making.count_ends(zip(sample.pieces[prompts:], responses, strict=True))
        response_ids = tuple(np.array(part, np.int32) for part in responses)
        prompt = np.array(prompt_ids, np.int32)
        return self.record(sample.row_id, prompt, response_ids, form=form, media=spans, **sample.carried)

    def document(self, row: ResponsesRow) -> Document:
        return responses_document(row, are_targets=True)


class Marked(Ranked):
    """`MarkedRow`s, for preference losses on unpaired responses."""

    name = "marked"
    key = "2_marked"
    record = MarkedRow
    responses: ClassVar[tuple[str, ...]] = ("chosen",)
    dropped_marks = {None: "unmarked"}
    columns: ClassVar[tuple[str, ...]] = ()
    hints = {
        "unmarked": "each response needs its own label, good or bad (for files, name the column with --label_column); "
        "write a pair as two rows"
    }

    def responses_of(self, mark: bool | None) -> tuple[str, ...]:
        return ("chosen",) if mark else ("rejected",)

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        return {"is_good": raw.get_mark(sample)}


class Prompts(RowKind):
    """`PromptRow`s, for PPO."""

    name = "prompts"
    phase = 3
    key = "3"
    record = PromptRow
    columns = ("reference",)
    carries_columns = True
    limit = "max_prompt_seq_len"
    truncation = "prompt_truncation"

    def parts(self, rows: RowArguments, texts: TextTokenizer) -> dict[str, str]:
        kept = [name in rows.return_columns for name in (RAW_IDS, RAW_CHAT, FULL_PROMPT)]
        kept += [True] if MESSAGES in rows.return_columns else []
        return {
            "max_prompt_seq_len": str(rows.max_prompt_seq_len),
            "prompt_truncation": rows.prompt_truncation,
            "kept on request": json.dumps(kept),
        }

    def read_chat(self, chat: ChatText, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        given, text = got(chat.raw, "get_prompt_messages", sample, where), None
        if given is None:
            text, _ = read_texts(chat.raw, responses, sample, where)
        conversation, media = chat.conversation(messages_of_text(text) if text is not None else given, sample, where)
        read, noted = chat.texts.unread(conversation).of_prompt(conversation)
        pieces = chat.texts.prompt(read)
        if text is None:
            text = "".join(piece.text for piece in pieces)
        made = ReadSample(where, chat.expanded(pieces, media, where), len(pieces), noted=noted, media=media)
        made.prompt_text, made.is_empty = text, asks_nothing(conversation.messages)
        if chat.return_raw_chat:
            made.chats = chats_of(chat.raw, conversation.messages, given is not None, where)
        return made

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        reference, columns = read_carried(raw, sample, source, read.where)
        return {"reference": reference, "columns": columns}

    def make(self, making: Making, sample: ReadSample, ids: list[Ids]) -> Row:
        whole = [token for part in ids for token in part]
        flags = making.flags
        if not whole or (sample.is_empty and RAW_CHAT not in flags.return_columns):
            raise Dropped("empty_prompt")
        if sample.is_empty:
            making.counts.noted[EMPTY_PROMPT] += 1
        most, truncation = flags.max_prompt_seq_len, flags.prompt_truncation
        if len(whole) > most and truncation == "drop":
            raise Dropped("prompt_too_long")
        if len(whole) > most and truncation == "error":
            raise TooLong(len(whole))
        places = cut_prompt(len(whole), most, truncation)
        spans = making.after_cut(making.spans(sample, whole), places)
        cut = [whole[place] for place in places]
        making.counts.truncated += len(cut) < len(whole)
        whole_text = "".join(piece.text for piece in sample.pieces)
        on_request = {RAW_IDS: cut, **sample.chats, FULL_PROMPT: whole_text}
        asked = {name: value for name, value in on_request.items() if name in flags.return_columns}
        columns = {**sample.carried["columns"], **asked}
        making.counts.columns.update(columns.keys())
        flipped, reference = np.array(cut[::-1], np.int32), sample.carried["reference"]
        digests = tuple(medium.digest for medium in sample.media)
        return PromptRow(sample.row_id, flipped, sample.prompt_text, reference, columns, spans, media_digests=digests)

    def document(self, row: PromptRow) -> Document:
        return prompt_document(row)


KINDS: dict[str, RowKind] = {kind.name: kind for kind in (Sentences(), Ranked(), Marked(), Prompts())}
_OF_PHASES = {1: "sentences", 2: "ranked", 3: "prompts"}


def kind_of(name_or_phase: str | int) -> RowKind:
    """The kind of that name, or the one that a phase trains on unless its step names another."""
    return KINDS[_OF_PHASES[name_or_phase] if isinstance(name_or_phase, int) else name_or_phase]
