"""From the flags to the rows of a phase: raw datasets, splits, tokens, cache.

Every rank calls the same function with the same arguments: the first to come builds, the others wait for
its lock and open what it published. There is no collective in here.

Row ids number the rows of all sources in the order of the flags (a source's training rows, then its own
evaluation rows), so an id means the same row in every phase that has the same `data_path`, and no training
row shares one with an evaluation row.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from training.utils.data import fingerprint
from training.utils.data.arguments import DataArguments
from training.utils.data.cache import Log, open_or_build
from training.utils.data.dataset import CachedSplit, SplitWriter
from training.utils.data.phases import PHASE_NAMES, PromptRow, ResponsesRow, Row, SentenceRow, TextBlock
from training.utils.data.raw_dataset import PromptRawDataset, load_by_name
from training.utils.data.readers import JsonLines
from training.utils.data.registry import create_raw_dataset
from training.utils.data.splits import carve_eval, parse_data_split, pick_rows, shuffled_order, split_indices
from training.utils.data.tokenize import (
    TextTokenizer,
    TooLong,
    cut_prompt,
    end_of_conversation_id,
    fit_sentences,
    require_pad_token,
)
from training.utils.run.errors import ThreestepError

_TEXTS_PER_CALL = 1024
_WHOLE_INTO_PHASE_1 = "1,0,0"
_ROW_TYPES: dict[int, type] = {1: SentenceRow, 2: ResponsesRow, 3: PromptRow}


@dataclass(frozen=True)
class SplitReport:
    """What became of the raw rows of one split: how many were kept, cut, and left out for which reason."""

    rows: int
    tokens: int
    truncated: int
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildReport:
    """The reports of both splits, and whether the cache had them."""

    train: SplitReport
    eval: SplitReport
    resumed: bool

    @property
    def sentence(self) -> str:
        """One line for a log: what was kept, cut and left out."""
        parts = []
        for name, split in (("train", self.train), ("eval", self.eval)):
            left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(split.dropped.items()))
            parts.append(
                f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {split.truncated:,} truncated, "
                + (f"dropped: {left_out}" if left_out else "none dropped")
            )
        return "; ".join(parts)


@dataclass(frozen=True)
class PhaseData:
    """The rows that one phase trains on and those it is evaluated on."""

    train: CachedSplit
    eval: CachedSplit
    report: BuildReport


@dataclass(frozen=True)
class _Source:
    """One entry of `data_path`, or of `sft_only_data_path`, whose `data_split` is all into phase 1."""

    name: str
    raw: PromptRawDataset
    data_split: str
    sft_only: bool = False


def build_phase(
    phase: int,
    data: DataArguments,
    tokenizer: Any,
    seed: int,
    is_main_rank: bool = True,
    log: Log | None = None,
) -> PhaseData:
    """The tokenized rows of phase 1, 2 or 3, out of the cache or built now.

    `log` gets a few lines (`built ...` or `resumed ...`, and the counts) on the main rank alone. Raises
    ThreestepError for every mistake in the data or the flags.
    """
    say = log if log is not None and is_main_rank else _silent
    parse_data_split(data.data_split)
    if phase in (2, 3):
        require_pad_token(tokenizer, f"phase {phase} ({PHASE_NAMES[phase]})")
    texts = TextTokenizer(tokenizer, data.end_of_conversation_token)
    sources = [
        _Source(name, create_raw_dataset(name, data, seed), data.data_split) for name in data.data_path
    ]
    if phase == 1:
        sources += [
            _Source(name, create_raw_dataset(name, data, seed), _WHOLE_INTO_PHASE_1, sft_only=True)
            for name in data.sft_only_data_path
        ]
    if not sources:
        raise ThreestepError(f"data_path: phase {phase} has no dataset; name at least one")

    def build(folder: str) -> dict[str, Any]:
        return _build_splits(folder, phase, data, texts, sources, seed)

    parts = _parts_of_phase(phase, data, tokenizer, texts, sources, seed)
    cached = open_or_build(data.cache_dir, f"phase{phase}", parts, build, data.rebuild_cache, say)
    reports = {
        key: SplitReport(entry["rows"], entry["tokens"], entry["truncated"], entry["dropped"])
        for key, entry in cached.manifest["splits"].items()
    }
    report = BuildReport(reports["train"], reports["eval"], cached.resumed)
    say(f"data: phase {phase}: {report.sentence}")
    return PhaseData(cached.splits["train"], cached.splits["eval"], report)


def _silent(line: str) -> None:
    pass


def _parts_of_phase(
    phase: int,
    data: DataArguments,
    tokenizer: Any,
    texts: TextTokenizer,
    sources: Sequence[_Source],
    seed: int,
) -> dict[str, str]:
    """Everything that the rows of a phase depend on, in clear; the values that would be long are hashes."""
    parts = {
        "datasets": json.dumps([(source.name, source.sft_only) for source in sources]),
        "phase": str(phase),
        "data_split": ",".join(str(weight) for weight in parse_data_split(data.data_split)),
        "seed": str(seed),
        "eval_fraction": str(data.eval_fraction),
        "max_train_rows": str(data.max_train_rows),
        "max_eval_rows": str(data.max_eval_rows),
        **fingerprint.parts_of_tokenizer(tokenizer),
        "ids before a prompt": str(texts.prefix_ids),
        "code": fingerprint.code_of_rows(),
    }
    if phase == 3:
        parts["max_prompt_seq_len"] = str(data.max_prompt_seq_len)
        parts["prompt_truncation"] = data.prompt_truncation
    else:
        parts["max_seq_len"] = str(data.max_seq_len)
        parts["truncation"] = data.truncation
        parts["end of conversation"] = str(texts.end_id)
    if phase == 1:
        parts["loss_on"] = data.loss_on
    if any(":" in source.name for source in sources):
        parts["columns"] = json.dumps([data.prompt_column, data.chosen_column, data.rejected_column])
    for number, source in enumerate(sources):
        label = f"[{number}] {source.name}"
        parts[f"rows of {label}"] = fingerprint.content_of_dataset(source.raw, data.cache_dir)
        parts[f"class of {label}"] = fingerprint.code_of_class(type(source.raw))
    return parts


def _build_splits(
    folder: str, phase: int, data: DataArguments, texts: TextTokenizer, sources: Sequence[_Source], seed: int
) -> dict[str, Any]:
    """Write train.arrow and eval.arrow; returns what the manifest says of them."""
    chosen: dict[str, list[tuple[_Source, Sequence[Any], np.ndarray, int]]] = {"train": [], "eval": []}
    described = []
    first_row_id = 0
    for source in sources:
        train, own_eval = source.raw.get_train_data(), source.raw.get_eval_data()
        if len(train) == 0:
            raise ThreestepError(f"dataset '{source.name}' is empty: it has no training rows")
        source.raw.check_phase(phase)
        own_rows = 0 if own_eval is None else len(own_eval)
        if own_eval is None or own_rows == 0:
            kept, eval_indices = carve_eval(len(train), data.eval_fraction, seed)
            eval_rows, eval_first_id = train, first_row_id
        else:
            kept, eval_indices = np.arange(len(train)), np.arange(own_rows)
            eval_rows, eval_first_id = own_eval, first_row_id + len(train)
        phases_of_kept = _phases_of(source, train, kept)
        phases_of_eval = _phases_of(source, eval_rows, eval_indices)
        if phases_of_eval is not None:
            eval_indices = eval_indices[[phase in phases for phases in phases_of_eval]]
        mine = kept[split_indices(len(kept), source.data_split, seed, phase, phases_of_kept)]
        chosen["train"].append((source, train, mine, first_row_id))
        chosen["eval"].append((source, eval_rows, eval_indices, eval_first_id))
        described.append(
            {
                "name": source.name,
                "first_row_id": first_row_id,
                "training_rows": len(train),
                "own_evaluation_rows": own_rows,
                "evaluation_rows_carved": own_rows == 0,
            }
        )
        first_row_id += len(train) + own_rows

    splits = {}
    for key, most in (("train", data.max_train_rows), ("eval", data.max_eval_rows)):
        picked = pick_rows([indices for _, _, indices, _ in chosen[key]], most, seed)
        counts = _Counts()
        with SplitWriter(os.path.join(folder, f"{key}.arrow"), _ROW_TYPES[phase]) as writer:
            for (source, rows, _, first_id), indices in zip(chosen[key], picked, strict=True):
                maker = _RowMaker(phase, data, texts, source, counts)
                for row in maker.rows(rows, indices, first_id):
                    writer.append(row)
        if key == "train" and writer.rows == 0:
            raise ThreestepError(_nothing_left(phase, data, sources, sum(map(len, picked)), counts))
        splits[key] = {"rows": writer.rows, "tokens": writer.tokens, **counts.as_json()}
    return {"phase": phase, "splits": splits, "sources": described}


def _phases_of(source: _Source, rows: Sequence[Any], indices: np.ndarray) -> list[tuple[int, ...]] | None:
    """What `get_phases` says of each row; None where the class does not override it: every row serves all."""
    if type(source.raw).get_phases is PromptRawDataset.get_phases:
        return None
    return [tuple(source.raw.get_phases(rows[int(index)])) for index in indices]


def _nothing_left(
    phase: int, data: DataArguments, sources: Sequence[_Source], offered: int, counts: _Counts
) -> str:
    names = ", ".join(f"'{source.name}'" for source in sources)
    start = f"phase {phase} ({PHASE_NAMES[phase]}) has no training rows: "
    if offered == 0:
        return start + (
            f"data_split {data.data_split} gives it none of the rows of {names}; raise its share or use "
            "more data"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
    hint = ""
    if "no_rejected" in counts.dropped:
        hint = "; a pair needs a rejected response (of jsonl: and json: files, --rejected_column names it)"
    elif set(counts.dropped) & {"too_long", "prompt_too_long", "response_cut_to_nothing"}:
        flag = "max_prompt_seq_len" if phase == 3 else "max_seq_len"
        hint = f"; raise {flag} or change the truncation"
    return start + f"all {offered} rows of {names} were dropped ({reasons}){hint}"


@dataclass
class _Counts:
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {"truncated": self.truncated, "dropped": dict(self.dropped)}


class _RowMaker:
    """Turns the raw rows of one source into records of one phase, a few hundred texts at a time."""

    def __init__(
        self, phase: int, data: DataArguments, texts: TextTokenizer, source: _Source, counts: _Counts
    ) -> None:
        self._data = data
        self._texts = texts
        self._source = source
        self._raw = source.raw
        self._counts = counts
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
            prompt = self._text(self._raw.get_prompt(sample), where, "get_prompt")
            if prompt is None:
                self._drop("no_prompt")
                continue
            read = self._read(sample, prompt, where)
            if isinstance(read, _Dropped):
                self._drop(read.reason)
                continue
            waiting.append((first_id + int(index), prompt, read))
            if len(waiting) == _TEXTS_PER_CALL:
                yield from self._make(waiting)
                waiting = []
        if waiting:
            yield from self._make(waiting)

    def _drop(self, reason: str) -> None:
        self._counts.dropped[reason] += 1

    def _text(self, value: Any, where: str, getter: str) -> str | None:
        if value is not None and not isinstance(value, str):
            raise ThreestepError(
                f"{where}: {type(self._raw).__name__}.{getter} gave {type(value).__name__}, expected "
                "text or None"
            )
        return value

    # Reading: what a phase takes from a sample, or why it is left out.

    def _response(self, sample: Any, prompt: str, kind: str, where: str) -> str | _Dropped:
        """The chosen or rejected text: the rest of the sentence behind the prompt.

        DeepSpeed-Chat asks for sentences alone (`get_prompt_and_chosen`), so that is what its subclasses
        surely have; where the sentence does not begin with the prompt, `get_chosen` is asked.
        """
        sentence = self._text(
            getattr(self._raw, f"get_prompt_and_{kind}")(sample), where, f"get_prompt_and_{kind}"
        )
        if sentence is None:
            return _Dropped(f"no_{kind}")
        if sentence.startswith(prompt):
            response: str | None = sentence[len(prompt) :]
        else:
            response = self._text(getattr(self._raw, f"get_{kind}")(sample), where, f"get_{kind}")
        if response is None:
            return _Dropped(f"no_{kind}")
        return response if response.strip() else _Dropped("empty_response")

    def _read_chosen(self, sample: Any, prompt: str, where: str) -> str | _Dropped:
        return self._response(sample, prompt, "chosen", where)

    def _read_responses(self, sample: Any, prompt: str, where: str) -> list[str] | _Dropped:
        given = self._raw.get_responses(sample)
        if given is None:
            both = [self._response(sample, prompt, kind, where) for kind in ("chosen", "rejected")]
            for response in both:
                if isinstance(response, _Dropped):
                    return response
            return both  # type: ignore[return-value]
        if len(given) < 2 or not all(isinstance(response, str) for response in given):
            raise ThreestepError(
                f"{where}: {type(self._raw).__name__}.get_responses gave {len(given)} responses "
                f"({', '.join(type(response).__name__ for response in given)}), expected 2 or more "
                "texts, or None"
            )
        return list(given) if all(response.strip() for response in given) else _Dropped("empty_response")

    def _read_prompt(self, sample: Any, prompt: str, where: str) -> Any:
        reference = self._raw.get_reference(sample)
        try:
            json.dumps(reference)
        except (TypeError, ValueError) as error:
            raise ThreestepError(
                f"{where}: {type(self._raw).__name__}.get_reference gave what JSON cannot hold: {error}"
            ) from error
        return reference

    # Making: tokens, lengths, records.

    def _make_sentences(self, waiting: Sequence[tuple[int, str, str]]) -> Iterator[Row]:
        for row_id, prompt_ids, (response_ids,) in self._fitted(
            [(row_id, prompt, [response]) for row_id, prompt, response in waiting], end_id=None
        ):
            loss_mask = np.ones(len(prompt_ids) + len(response_ids), dtype=bool)
            if self._data.loss_on == "response":
                loss_mask[: len(prompt_ids)] = False
            loss_mask[0] = False
            yield SentenceRow(row_id, np.array(prompt_ids + response_ids, np.int32), loss_mask)

    def _make_responses(self, waiting: Sequence[tuple[int, str, list[str]]]) -> Iterator[Row]:
        for row_id, prompt_ids, responses in self._fitted(waiting, end_id=self._texts.end_id):
            if len({tuple(ids) for ids in responses}) < len(responses):
                self._drop("identical_responses")
                continue
            yield ResponsesRow(
                row_id, np.array(prompt_ids, np.int32), tuple(np.array(ids, np.int32) for ids in responses)
            )

    def _fitted(
        self, waiting: Sequence[tuple[int, str, list[str]]], end_id: int | None
    ) -> Iterator[tuple[int, list[int], tuple[list[int], ...]]]:
        """Tokenized rows of prompt and responses that keep within max_seq_len; counts what is cut or left
        out.
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
            if not ids:
                self._drop("empty_prompt")
                continue
            try:
                fitted = fit_sentences(ids, responses, self._data.max_seq_len, self._data.truncation, end_id)
            except TooLong as long:
                raise ThreestepError(
                    f"dataset '{self._source.name}', row id {row_id}: a sentence of "
                    f"{long.length_tokens} tokens, and "
                    f"max_seq_len is {self._data.max_seq_len} with truncation 'error'; raise "
                    "max_seq_len or choose "
                    "another truncation"
                ) from None
            if fitted.dropped:
                self._drop(fitted.dropped)
                continue
            self._counts.truncated += fitted.truncated
            yield row_id, fitted.prompt_ids, fitted.response_ids

    def _make_prompts(self, waiting: Sequence[tuple[int, str, Any]]) -> Iterator[Row]:
        most, truncation = self._data.max_prompt_seq_len, self._data.prompt_truncation
        prompts = self._texts.encode_prompts([prompt for _, prompt, _ in waiting])
        for (row_id, prompt, reference), ids in zip(waiting, prompts, strict=True):
            if not ids:
                self._drop("empty_prompt")
                continue
            if len(ids) > most:
                if truncation == "error":
                    raise ThreestepError(
                        f"dataset '{self._source.name}', row id {row_id}: a prompt of {len(ids)} tokens, and "
                        f"max_prompt_seq_len is {most} with prompt_truncation 'error'; raise "
                        "max_prompt_seq_len or "
                        "choose another prompt_truncation"
                    )
                if truncation == "drop":
                    self._drop("prompt_too_long")
                    continue
                ids = cut_prompt(ids, most, truncation)
                self._counts.truncated += 1
            yield PromptRow(row_id, np.array(ids[::-1], np.int32), prompt, reference)


@dataclass(frozen=True)
class _Dropped:
    reason: str


def build_unsupervised(
    data: DataArguments,
    tokenizer: Any,
    block_length: int,
    seed: int,
    is_main_rank: bool = True,
    log: Log | None = None,
) -> CachedSplit:
    """Text of `unsupervised_dataset_name` as blocks of exactly `block_length` tokens, out of the cache or
    built now.

    Documents are put in an order decided by the seed, each with what the tokenizer puts before a text and
    its eos
    behind (the end-of-conversation token where the tokenizer has no eos), joined and cut; the last, shorter
    block is left out and its tokens are counted in the manifest (`tokens_left_over`).
    """
    say = log if log is not None and is_main_rank else _silent
    name = data.unsupervised_dataset_name
    if name is None:
        raise ThreestepError(
            "unsupervised_dataset_name: no dataset is named; name one, or a file as jsonl:PATH"
        )
    texts = TextTokenizer(tokenizer, data.end_of_conversation_token)
    end_id = texts.end_id if tokenizer.eos_token_id is None else end_of_conversation_id(tokenizer, None)
    column = data.unsupervised_text_column
    if name.startswith("jsonl:"):
        path = name[len("jsonl:") :]
        if not os.path.isfile(path):
            raise ThreestepError(f"unsupervised_dataset_name: there is no file '{path}'")
        content = fingerprint.digest_file(path, data.cache_dir)
        rows: Any = None
    else:
        rows = _unsupervised_rows(name, data.unsupervised_dataset_config_name, column)
        content = fingerprint.content_of_rows(rows, data.cache_dir)

    def build(folder: str) -> dict[str, Any]:
        source = rows
        if source is None:
            source = JsonLines(path, {column: "unsupervised_text_column"}, (column,))
        with SplitWriter(os.path.join(folder, "train.arrow"), TextBlock) as writer:
            left_over = _write_blocks(writer, source, column, texts, end_id, block_length, seed)
        if writer.rows == 0:
            raise ThreestepError(
                f"unsupervised_dataset_name: '{name}' has {left_over} tokens, fewer than one block of "
                f"{block_length}; use more text or shorter blocks"
            )
        counts = {"rows": writer.rows, "tokens": writer.tokens, "tokens_left_over": left_over}
        return {"splits": {"train": counts}}

    parts = {
        "datasets": json.dumps([name, data.unsupervised_dataset_config_name]),
        "rows": content,
        "text column": column,
        "block length": str(block_length),
        "seed": str(seed),
        "end of text": str(end_id),
        "ids before a text": str(texts.prefix_ids),
        **fingerprint.parts_of_tokenizer(tokenizer),
        "code": fingerprint.code_of_rows(),
    }
    return open_or_build(data.cache_dir, "text", parts, build, data.rebuild_cache, say).splits["train"]


def _unsupervised_rows(name: str, config_name: str | None, column: str) -> Any:
    loaded = load_by_name(name, config_name)
    rows = loaded["train"] if isinstance(loaded, dict) else loaded
    if column not in rows.column_names:
        raise ThreestepError(
            f"unsupervised_dataset_name: '{name}' has no column '{column}', its columns are "
            f"{', '.join(rows.column_names)}; name the right one with --unsupervised_text_column"
        )
    return rows


def _write_blocks(
    writer: SplitWriter,
    rows: Any,
    column: str,
    texts: TextTokenizer,
    end_id: int,
    block_length: int,
    seed: int,
) -> int:
    """Returns how many tokens were left over."""
    order = shuffled_order(len(rows), seed)
    waiting = np.zeros(0, np.int32)
    for begin in range(0, len(order), _TEXTS_PER_CALL):
        documents = [rows[int(index)][column] for index in order[begin : begin + _TEXTS_PER_CALL]]
        encoded = texts.encode_texts([text for text in documents if text])
        waiting = np.concatenate([waiting, *(np.array([*ids, end_id], np.int32) for ids in encoded)])
        whole = len(waiting) // block_length
        for block in waiting[: whole * block_length].reshape(whole, block_length):
            writer.append(TextBlock(writer.rows, block))
        waiting = waiting[whole * block_length :]
    return len(waiting)
