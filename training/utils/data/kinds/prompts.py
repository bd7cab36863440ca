"""Prompts, which a policy answers, with what rewards are handed besides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow, Row
from training.utils.data.kinds.kind import Making, RowKind, Waiting
from training.utils.data.kinds.samples import checked_json, got, read_carried, read_texts
from training.utils.data.kinds.strategies import ReadSample, asks_nothing
from training.utils.data.rows.arguments import FULL_PROMPT, MESSAGES, RAW_CHAT, RAW_IDS
from training.utils.data.rows.documents import prompt_document
from training.utils.data.rows.tokenize import Dropped, Ids, TextTokenizer, cut_prompt
from training.utils.data.sources.formats.messages import messages_of_text

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.data.kinds.strategies import ChatText
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.data.sources.raw_dataset import PromptRawDataset


EMPTY_PROMPT = (
    "whose prompt is empty, kept for an environment, which may begin with another (--return_columns raw_prompt)"
)


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
    loss = "a prompt carries none: PPO learns from the responses that it samples"

    def parts(self, rows: RowArguments, texts: TextTokenizer) -> dict[str, str]:
        kept = [name in rows.return_columns for name in (RAW_IDS, RAW_CHAT, FULL_PROMPT)]
        kept += [True] if MESSAGES in rows.return_columns else []
        return {
            "max_prompt_seq_len": str(rows.max_prompt_seq_len),
            "prompt_truncation": rows.prompt_truncation,
            "kept on request": json.dumps(kept),
        }

    def read_chat(self, chat: ChatText, responses: Sequence[str], sample: Any, where: str) -> ReadSample:
        messages, text = got(chat.raw, "get_prompt_messages", sample, where), None
        has_messages = messages is not None
        if messages is None:
            text, _ = read_texts(chat.raw, responses, sample, where)
            messages = messages_of_text(text)
        conversation, media = chat.conversation(messages, sample, where)
        read, noted = chat.texts.unread(conversation).of_prompt(conversation)
        pieces = chat.texts.prompt(read)
        if text is None:
            text = "".join(piece.text for piece in pieces)
        raw_chat = None
        if chat.return_raw_chat:
            raw_chat = checked_json(chat.raw, "get_prompt_messages", conversation.messages, where)
        pieces = chat.expanded(pieces, media, where)
        made = ReadSample(where, pieces, len(pieces), text, raw_chat, noted=noted, media=media)
        made.has_messages, made.is_empty = has_messages, asks_nothing(conversation.messages)
        return made

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        reference, columns = read_carried(raw, sample, source, read.where)
        return {"reference": reference, "columns": columns}

    def make(self, making: Making, one: Waiting, ids: list[Ids]) -> Row:
        whole = [token for part in ids for token in part]
        flags, sample = making.flags, one.sample
        if not whole or (sample.is_empty and RAW_CHAT not in flags.return_columns):
            raise Dropped("empty_prompt")
        if sample.is_empty:
            making.counts.noted[EMPTY_PROMPT] += 1
        most, truncation = flags.max_prompt_seq_len, flags.prompt_truncation
        if len(whole) > most and truncation == "drop":
            raise Dropped("prompt_too_long")
        if len(whole) > most and truncation == "error":
            raise ThreestepError(
                f"dataset '{making.source_name}', row id {one.row_id}: a prompt of {len(whole)} tokens, and "
                f"max_prompt_seq_len is {most} with prompt_truncation 'error'; raise max_prompt_seq_len or choose "
                "another prompt_truncation"
            )
        places = cut_prompt(list(range(len(whole))), most, truncation)
        spans = making.after_cut(making.spans(one, whole), places)
        cut = [whole[place] for place in places]
        making.counts.truncated += len(cut) < len(whole)
        whole_text = "".join(piece.text for piece in sample.pieces)
        on_request = {RAW_IDS: cut, RAW_CHAT: sample.raw_chat, MESSAGES: sample.raw_chat, FULL_PROMPT: whole_text}
        if not sample.has_messages:
            del on_request[MESSAGES]
        asked = {name: value for name, value in on_request.items() if name in flags.return_columns}
        columns = {**one.carried["columns"], **asked}
        making.counts.columns.update(columns.keys())
        flipped = np.array(cut[::-1], np.int32)
        digests = tuple(medium.digest for medium in sample.media)
        return PromptRow(
            one.row_id, flipped, sample.prompt_text, one.carried["reference"], columns, spans, media_digests=digests
        )

    def document(self, row: PromptRow) -> Document:
        return prompt_document(row)
