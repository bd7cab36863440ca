"""The raw rows of one source become the tokenized rows of one phase; rows that are left out are counted.

Knows nothing of splits, files or the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow, ResponsesRow, Row, SentenceRow
from training.utils.data.build.parallel_thinking import ParallelCheck
from training.utils.data.build.samples import read_carried, read_margins
from training.utils.data.build.sentences import PARTS_TAKEN, has_sentences, parts_are_taken
from training.utils.data.build.strategies import GLUED, ChatText, PlainText, ReadSample, is_glued
from training.utils.data.chat.chat import ChatTokenizer, TextPiece, fit_conversation, joined
from training.utils.data.rows.tokenize import Dropped, Ids, TextTokenizer, TooLong, cut_prompt, fit_sentences
from training.utils.data.sources.formats.messages import BadConversation
from training.utils.images.data.row_pictures import after_cut
from training.utils.layout.parallel import MalformedBlocks

if TYPE_CHECKING:
    from training.utils.contracts.media import ReadsMedia
    from training.utils.data.build.portions import DataSource
    from training.utils.data.cache.reports import Counts
    from training.utils.data.chat.arguments import ChatArguments
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.images.spans import ImageSpan

ROWS_PER_CALL = 1024  # of the tokenizer


@dataclass(frozen=True)
class _Waiting:
    """A sample that waits for the tokenizer. margins: of phase 2; reference and columns: of phase 3."""

    row_id: int
    sample: ReadSample
    margins: np.ndarray | None = None
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)


class RowMaker:
    """Turns the raw rows of one source into records of one phase, `ROWS_PER_CALL` at a time."""

    def __init__(
        self,
        phase: int,
        chat: ChatArguments,
        rows: RowArguments,
        texts: TextTokenizer | ChatTokenizer,
        source: DataSource,
        counts: Counts,
        images: ReadsMedia | None = None,
    ) -> None:
        """images: reads those of the rows; None where the model reads text alone."""
        self._phase = phase
        self._flags = rows
        self._source = source
        self._counts = counts
        self._images = images
        self._strategy: PlainText | ChatText
        if isinstance(texts, ChatTokenizer):
            options = (chat.train_turns, rows.return_raw_chat, rows.loss_on)
            self._strategy = ChatText(phase, texts, source.raw, *options, images)
            self._drops_bad = chat.bad_conversations == "drop"
            texts = texts.texts
        else:
            self._drops_bad = False
            self._strategy = PlainText(phase, texts, source.raw, rows.return_raw_chat, rows.loss_on)
        self._has_sentences = has_sentences(source.raw)
        self._end_id, self._special = texts.end_id, texts.special
        self._parallel = ParallelCheck(chat, texts.parallel_tags, counts.parallel)
        makers: dict[int, Callable[[_Waiting, list[Ids]], Row]]
        makers = {1: self._sentence, 2: self._responses, 3: self._prompt}
        self._make = makers[phase]

    def rows(self, rows: Sequence[Any], indices: Iterable[int], first_id: int) -> Iterator[Row]:
        """The records of the rows at `indices`; the row at index i has the id `first_id` + i.

        Getters are handed a copy of a row that stays in memory: they may change it, and it is read again.
        """
        waiting: list[_Waiting] = []
        for index in map(int, indices):
            sample = deepcopy(rows[index]) if isinstance(rows, (list, tuple)) else rows[index]
            with self._counting_drops():
                waiting.append(self._take(sample, first_id + index, f"dataset '{self._source.name}', row {index}"))
            if len(waiting) == ROWS_PER_CALL:
                yield from self._made(waiting)
                waiting = []
        if waiting:
            yield from self._made(waiting)

    def _take(self, sample: Any, row_id: int, where: str) -> _Waiting:
        self._check_images(sample, where)
        mark = self._source.raw.get_mark(sample)
        if mark is False and self._phase == 1:
            raise Dropped("marked_bad")
        if mark is not None and self._phase == 2:
            raise Dropped("unpaired")
        read = self._strategy.read(sample, where)
        if read.noted is not None:
            self._counts.noted[read.noted] += 1
        if self._has_sentences and parts_are_taken(self._source.raw, self._phase, sample):
            self._counts.noted[PARTS_TAKEN] += 1
        if self._phase != 3 and isinstance(self._strategy, PlainText) and is_glued(read):
            self._counts.noted[GLUED] += 1
        if self._phase == 2:
            responses = len(read.pieces) - read.prompts
            return _Waiting(row_id, read, read_margins(self._source.raw, sample, responses, where))
        if self._phase == 3:
            reference, columns = read_carried(self._source.raw, sample, self._source.name, where)
            return _Waiting(row_id, read, None, reference, columns)
        return _Waiting(row_id, read)

    def _check_images(self, sample: Any, where: str) -> None:
        """Raise BadConversation for images that nothing reads."""
        if self._images is not None and isinstance(self._strategy, ChatText):
            return
        if not self._source.raw.get_images(sample):
            return
        if self._images is None:
            raise BadConversation(
                f"{where}: get_images returned images, and {self._source.raw.unread_images}; leave such rows out"
            )
        raise BadConversation(
            f"{where}: the row has images, whose places a chat template writes; use --prompt_style chat_template"
        )

    def _spans(self, one: _Waiting, ids: Ids, others: Sequence[Ids] = ()) -> tuple[ImageSpan, ...]:
        """Spans of a row's images in its tokens `ids`; none may stand in `others`."""
        if self._images is None:
            return ()
        for each in others:
            self._images.spans(each, (), one.sample.where)
        return self._images.spans(ids, one.sample.images, one.sample.where)

    def _made(self, waiting: Sequence[_Waiting]) -> Iterator[Row]:
        for one, ids in zip(waiting, self._strategy.encode([one.sample for one in waiting]), strict=True):
            try:
                with self._counting_drops():
                    if isinstance(ids, BadConversation):
                        raise ids
                    yield self._make(one, ids)
            except TooLong as long:
                raise ThreestepError(
                    f"dataset '{self._source.name}', row id {one.row_id}: a sentence of {long.length_tokens} tokens, "
                    f"and max_seq_len is {self._flags.max_seq_len} with truncation 'error'; raise max_seq_len or "
                    "choose another truncation"
                ) from None

    @contextmanager
    def _counting_drops(self) -> Iterator[None]:
        """Count a row that is left out; the next one follows."""
        try:
            yield
        except Dropped as dropped:
            self._counts.dropped[str(dropped)] += 1
        except MalformedBlocks:
            self._counts.dropped["malformed_parallel"] += 1
        except BadConversation:
            if not self._drops_bad:
                raise
            self._counts.dropped["bad_conversation"] += 1

    def _sentence(self, one: _Waiting, ids: list[Ids]) -> Row:
        whole = joined(one.sample.pieces, ids)
        spans = self._spans(one, whole.ids)
        tags = self._parallel.tags_of([whole.ids], one.sample.where, whole.loss)
        conversation, was_cut = fit_conversation(whole, self._flags.max_seq_len, self._flags.truncation)
        if was_cut and spans:
            placed = replace(whole, ids=list(range(len(whole.ids))))
            fitted, _ = fit_conversation(placed, self._flags.max_seq_len, self._flags.truncation)
            spans = after_cut(spans, fitted.ids)
        if was_cut and tags and not self._parallel.is_whole([conversation.ids], conversation.loss, may_end_open=True):
            raise Dropped("cut_inside_a_block")
        self._counts.truncated += was_cut
        if not was_cut:
            learnt = zip(one.sample.pieces, ids, strict=True)
            self._count_ends((piece, piece_ids) for piece, piece_ids in learnt if piece.carries_loss)
        loss_mask = np.array(conversation.loss, bool)
        if self._flags.loss_on == "conversation":
            loss_mask[:] = True
            for span in spans:
                loss_mask[span.begin : span.end] = False
        loss_mask[0] = False
        return SentenceRow(one.row_id, np.array(conversation.ids, np.int32), loss_mask, tags, spans)

    def _responses(self, one: _Waiting, ids: list[Ids]) -> Row:
        prompts = one.sample.prompts
        prompt_ids = [token for part in ids[:prompts] for token in part]
        spans = self._spans(one, prompt_ids, ids[prompts:])
        tags = self._parallel.tags_of(ids[prompts:], one.sample.where)
        most, truncation = self._flags.max_seq_len, self._flags.truncation
        places = list(range(len(prompt_ids)))  # cut as the tokens would be
        places, responses, was_cut = fit_sentences(places, ids[prompts:], most, truncation, self._end_id)
        spans = after_cut(spans, places)
        prompt_ids = [prompt_ids[place] for place in places]
        self._counts.truncated += was_cut
        if not prompt_ids:  # only phase 1 trains on text without a prompt
            raise Dropped("empty_prompt")
        if len({tuple(part) for part in responses}) < len(responses):
            raise Dropped("identical_responses")
        if tags and not self._parallel.is_whole(responses):
            raise Dropped("cut_inside_a_block")  # the end token would be in a path, and the score that path's alone
        if not was_cut:
            self._count_ends(zip(one.sample.pieces[prompts:], responses, strict=True))
        response_ids = tuple(np.array(part, np.int32) for part in responses)
        prompt = np.array(prompt_ids, np.int32)
        return ResponsesRow(one.row_id, prompt, response_ids, one.margins, tags, media=spans)

    def _count_ends(self, learnt: Iterable[tuple[TextPiece, Ids]]) -> None:
        """Count the special tokens that carry loss: those at the end of a response, and those before it."""
        for piece, ids in learnt:
            last = ids[-1] if piece.is_end and ids else None
            before = ids if last is None else ids[:-1]
            self._counts.inside.update(self._special[token] for token in before if token in self._special)
            if last in self._special:
                self._counts.ends[self._special[last]] += 1

    def _prompt(self, one: _Waiting, ids: list[Ids]) -> Row:
        whole = [token for part in ids for token in part]
        if not whole:
            raise Dropped("empty_prompt")
        most, truncation = self._flags.max_prompt_seq_len, self._flags.prompt_truncation
        if len(whole) > most and truncation == "drop":
            raise Dropped("prompt_too_long")
        if len(whole) > most and truncation == "error":
            raise ThreestepError(
                f"dataset '{self._source.name}', row id {one.row_id}: a prompt of {len(whole)} tokens, and "
                f"max_prompt_seq_len is {most} with prompt_truncation 'error'; raise max_prompt_seq_len or choose "
                "another prompt_truncation"
            )
        places = cut_prompt(list(range(len(whole))), most, truncation)
        spans = after_cut(self._spans(one, whole), places)
        cut = [whole[place] for place in places]
        self._counts.truncated += len(cut) < len(whole)
        columns = dict(one.columns)  # and those on request, by verl's names
        if self._flags.return_raw_ids:
            columns["raw_prompt_ids"] = cut
        if self._flags.return_raw_chat:
            columns["raw_prompt"] = one.sample.raw_chat
        if self._flags.return_full_prompt:
            columns["full_prompts"] = "".join(piece.text for piece in one.sample.pieces)
        self._counts.columns.update(columns.keys())
        flipped = np.array(cut[::-1], np.int32)
        digests = tuple(image.digest for image in one.sample.images)
        return PromptRow(one.row_id, flipped, one.sample.prompt_text, one.reference, columns, spans, digests)
