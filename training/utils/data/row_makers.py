"""The raw rows of one source become the tokenized rows of one phase; what is left out is counted.

Knows nothing of splits, files or the cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from training.utils.data.arguments import DataArguments
from training.utils.data.conversations import checked_messages, messages_of_text
from training.utils.data.parallel_thinking import ParallelCheck
from training.utils.data.phases import PromptRow, ResponsesRow, Row, SentenceRow
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.reports import Counts
from training.utils.data.sources import Source
from training.utils.data.tokenize import Ids, TextTokenizer, TooLong, cut_prompt, fit_sentences
from training.utils.layout.parallel import MalformedBlocks
from training.utils.run.errors import ThreestepError

TEXTS_PER_CALL = 1024


@dataclass(frozen=True)
class Dropped:
    reason: str


@dataclass(frozen=True)
class Ranked:
    """The responses of a row, best first, and its margins (see ResponsesRow)."""

    texts: list[str]
    margins: np.ndarray | None


# What a phase takes from a sample as text, or why the sample is left out.


def read_text(raw: PromptRawDataset, getter: str, sample: Any, where: str) -> str | None:
    value = getattr(raw, getter)(sample)
    if value is not None and not isinstance(value, str):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.{getter} gave {type(value).__name__}, expected text or None"
        )
    return value


def read_response(raw: PromptRawDataset, sample: Any, prompt: str, kind: str, where: str) -> str | Dropped:
    """The chosen or rejected text: the rest of the sentence behind the prompt.

    DeepSpeed-Chat asks for sentences alone (`get_prompt_and_chosen`), so that is what its subclasses surely
    have; where the sentence does not begin with the prompt, `get_chosen` is asked.
    """
    sentence = read_text(raw, f"get_prompt_and_{kind}", sample, where)
    if sentence is None:
        return Dropped(f"no_{kind}")
    if sentence.startswith(prompt):
        response: str | None = sentence[len(prompt) :]
    else:
        response = read_text(raw, f"get_{kind}", sample, where)
    if response is None:
        return Dropped(f"no_{kind}")
    return response if response.strip() else Dropped("empty_response")


def read_ranked_texts(raw: PromptRawDataset, sample: Any, prompt: str, where: str) -> list[str] | Dropped:
    """Two or more responses, best first."""
    given = raw.get_responses(sample)
    if given is None:
        both = [read_response(raw, sample, prompt, kind, where) for kind in ("chosen", "rejected")]
        for response in both:
            if isinstance(response, Dropped):
                return response
        return both  # type: ignore[return-value]
    if len(given) < 2 or not all(isinstance(response, str) for response in given):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.get_responses gave {len(given)} responses "
            f"({', '.join(type(response).__name__ for response in given)}), expected 2 or more "
            "texts, or None"
        )
    return list(given) if all(response.strip() for response in given) else Dropped("empty_response")


def read_margins(raw: PromptRawDataset, sample: Any, responses: int, where: str) -> np.ndarray | None:
    """What `get_margin` says of each two neighbours of the ranking."""
    given = raw.get_margin(sample)
    if given is None:
        return None
    numbers = list(given) if isinstance(given, (Sequence, np.ndarray)) else [given] * (responses - 1)
    numeric = all(isinstance(number, Real) and not isinstance(number, bool) for number in numbers)
    if len(numbers) != responses - 1 or not numeric or not all(0 <= number < math.inf for number in numbers):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.get_margin gave {given!r}, expected a number from 0 up, "
            f"{responses - 1} of them (between each two neighbours of the {responses} ranked responses), or None"
        )
    return np.array(numbers, np.float32)


@dataclass(frozen=True)
class Carried:
    """What a prompt carries to rewards and samples (see PromptRow)."""

    reference: Any
    columns: dict[str, Any]


# What every reward function takes besides a row's columns (step 3).
_ARGUMENTS_OF_REWARDS = ("prompts", "responses")


def read_carried(raw: PromptRawDataset, sample: Any, source_name: str, where: str) -> Carried:
    """The reference, and what `get_extra` gives besides.

    A `ground_truth` among the extras is the reference where `get_reference` gives none; `data_source` is the dataset's
    name where the extras have none.
    """
    reference = checked_json(raw, "get_reference", raw.get_reference(sample), where)
    extra = checked_json(raw, "get_extra", raw.get_extra(sample), where)
    if extra is not None and not isinstance(extra, dict):
        raise ThreestepError(
            f"{where}: {type(raw).__name__}.get_extra gave {type(extra).__name__}, expected values by name in a dict, "
            "or None"
        )
    columns = {"data_source": source_name, **(extra or {})}
    taken = [name for name in _ARGUMENTS_OF_REWARDS if name in columns]
    if taken:
        raise ThreestepError(
            f"{where}: '{taken[0]}' cannot be the name of a column that step 3 carries: every reward function has "
            "an argument of that name; rename the column"
        )
    given = columns.pop("ground_truth", None)
    return Carried(given if reference is None else reference, columns)


def checked_json(raw: PromptRawDataset, getter: str, value: Any, where: str) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ThreestepError(f"{where}: {type(raw).__name__}.{getter} gave what JSON cannot hold: {error}") from error
    return value


def columns_on_request(
    data: DataArguments, ids: Ids, messages: list[dict[str, Any]] | None, full_prompt: str
) -> dict[str, Any]:
    """The columns of `--return_raw_ids`, `--return_raw_chat` and `--return_full_prompt`, by verl's names."""
    columns: dict[str, Any] = {}
    if data.return_raw_ids:
        columns["raw_prompt_ids"] = [int(token) for token in ids]
    if data.return_raw_chat:
        columns["raw_prompt"] = messages
    if data.return_full_prompt:
        columns["full_prompts"] = full_prompt
    return columns


# Lengths.


def too_long(source: Source, row_id: int, long: TooLong, data: DataArguments) -> ThreestepError:
    return ThreestepError(
        f"dataset '{source.name}', row id {row_id}: a sentence of {long.length_tokens} tokens, and max_seq_len is "
        f"{data.max_seq_len} with truncation 'error'; raise max_seq_len or choose another truncation"
    )


def fit_prompt(ids: Ids, source: Source, row_id: int, data: DataArguments) -> Ids | Dropped:
    """A prompt of phase 3 within max_prompt_seq_len."""
    most, truncation = data.max_prompt_seq_len, data.prompt_truncation
    if len(ids) <= most:
        return ids
    if truncation == "error":
        raise ThreestepError(
            f"dataset '{source.name}', row id {row_id}: a prompt of {len(ids)} tokens, and max_prompt_seq_len is "
            f"{most} with prompt_truncation 'error'; raise max_prompt_seq_len or choose another prompt_truncation"
        )
    return Dropped("prompt_too_long") if truncation == "drop" else cut_prompt(ids, most, truncation)


class RowMaker:
    """Turns the raw rows of one source into records of one phase, a few hundred texts at a time."""

    def __init__(self, phase: int, data: DataArguments, texts: TextTokenizer, source: Source, counts: Counts) -> None:
        self._data = data
        self._texts = texts
        self._source = source
        self._raw = source.raw
        self._counts = counts
        self._parallel = ParallelCheck(data, texts.parallel_tags, counts.parallel)
        self._read: Callable[[Any, str, str], Any] = {
            1: self._read_chosen,
            2: self._read_responses,
            3: self._read_prompt,
        }[phase]
        makers: dict[int, Callable[..., Iterator[Row]]] = {
            1: self._make_sentences,
            2: self._make_responses,
            3: self._make_prompts,
        }
        self._make = makers[phase]

    def rows(self, rows: Sequence[Any], indices: Iterable[int], first_id: int) -> Iterator[Row]:
        waiting: list[tuple[int, str, Any]] = []
        for index in indices:
            sample, where = rows[int(index)], f"dataset '{self._source.name}', row {int(index)}"
            prompt = read_text(self._raw, "get_prompt", sample, where)
            if prompt is None:
                self._drop("no_prompt")
                continue
            read = self._read(sample, prompt, where)
            if isinstance(read, Dropped):
                self._drop(read.reason)
                continue
            waiting.append((first_id + int(index), prompt, read))
            if len(waiting) == TEXTS_PER_CALL:
                yield from self._make(waiting)
                waiting = []
        if waiting:
            yield from self._make(waiting)

    def _drop(self, reason: str) -> None:
        self._counts.dropped[reason] += 1

    # Reading: what a phase takes from a sample, or why it is left out.

    def _read_chosen(self, sample: Any, prompt: str, where: str) -> str | Dropped:
        return read_response(self._raw, sample, prompt, "chosen", where)

    def _read_responses(self, sample: Any, prompt: str, where: str) -> Ranked | Dropped:
        texts = read_ranked_texts(self._raw, sample, prompt, where)
        if isinstance(texts, Dropped):
            return texts
        return Ranked(texts, read_margins(self._raw, sample, len(texts), where))

    def _read_prompt(self, sample: Any, prompt: str, where: str) -> tuple[Carried, list[dict[str, Any]] | None]:
        messages = None
        if self._data.return_raw_chat:
            messages = checked_messages(self._raw.get_prompt_messages(sample) or messages_of_text(prompt), where)
            checked_json(self._raw, "get_prompt_messages", messages, where)
        return read_carried(self._raw, sample, self._source.name, where), messages

    # Making: tokens, lengths, records.

    def _make_sentences(self, waiting: Sequence[tuple[int, str, str]]) -> Iterator[Row]:
        for row_id, prompt_ids, (response_ids,), tags in self._fitted(
            [(row_id, prompt, [response]) for row_id, prompt, response in waiting], end_id=None
        ):
            loss_mask = np.ones(len(prompt_ids) + len(response_ids), dtype=bool)
            if self._data.loss_on == "response":
                loss_mask[: len(prompt_ids)] = False
            loss_mask[0] = False
            yield SentenceRow(row_id, np.array(prompt_ids + response_ids, np.int32), loss_mask, tags)

    def _make_responses(self, waiting: Sequence[tuple[int, str, Ranked]]) -> Iterator[Row]:
        margins = {row_id: ranked.margins for row_id, _, ranked in waiting}
        for row_id, prompt_ids, responses, tags in self._fitted(
            [(row_id, prompt, ranked.texts) for row_id, prompt, ranked in waiting], end_id=self._texts.end_id
        ):
            if not prompt_ids:  # phase 1 alone trains on text that follows no prompt
                self._drop("empty_prompt")
                continue
            if len({tuple(ids) for ids in responses}) < len(responses):
                self._drop("identical_responses")
                continue
            if tags is not None and not self._parallel.is_whole(responses):
                self._drop("cut_inside_a_block")  # the end token would be a path's, and the score that path's alone
                continue
            yield ResponsesRow(
                row_id=row_id,
                prompt_ids=np.array(prompt_ids, np.int32),
                response_ids=tuple(np.array(ids, np.int32) for ids in responses),
                margins=margins[row_id],
                parallel_tags=tags,
            )

    def _fitted(
        self, waiting: Sequence[tuple[int, str, list[str]]], end_id: int | None
    ) -> Iterator[tuple[int, list[int], tuple[list[int], ...], tuple[int, ...] | None]]:
        """Tokenized rows of prompt and responses that keep within max_seq_len, with the tags of those that have blocks
        of parallel paths; counts what is cut or left out.
        """
        prompt_ids = self._texts.encode_prompts([prompt for _, prompt, _ in waiting])
        spread = [(place, text) for place, (_, _, texts) in enumerate(waiting) for text in texts]
        encoded = iter(
            self._texts.encode_responses(
                [waiting[place][1] for place, _ in spread],
                [prompt_ids[place] for place, _ in spread],
                [text for _, text in spread],
            )
        )
        for (row_id, _, texts), ids in zip(waiting, prompt_ids, strict=True):
            responses = [next(encoded) for _ in texts]
            where = f"dataset '{self._source.name}', row id {row_id}"
            try:
                tags = self._parallel.tags_of(responses, where)
            except MalformedBlocks:
                self._drop("malformed_parallel")
                continue
            try:
                fitted = fit_sentences(ids, responses, self._data.max_seq_len, self._data.truncation, end_id)
            except TooLong as long:
                raise too_long(self._source, row_id, long, self._data) from None
            if fitted.dropped:
                self._drop(fitted.dropped)
                continue
            self._counts.truncated += fitted.truncated
            yield row_id, fitted.prompt_ids, fitted.response_ids, tags

    def _make_prompts(self, waiting: Sequence[tuple[int, str, Any]]) -> Iterator[Row]:
        prompts = self._texts.encode_prompts([prompt for _, prompt, _ in waiting])
        for (row_id, prompt, (carried, messages)), ids in zip(waiting, prompts, strict=True):
            if not ids:
                self._drop("empty_prompt")
                continue
            cut = fit_prompt(ids, self._source, row_id, self._data)
            if isinstance(cut, Dropped):
                self._drop(cut.reason)
                continue
            self._counts.truncated += len(cut) < len(ids)
            columns = {**carried.columns, **columns_on_request(self._data, cut, messages, prompt)}
            self._counts.columns.update(columns.keys())
            yield PromptRow(row_id, np.array(cut[::-1], np.int32), prompt, carried.reference, columns)
