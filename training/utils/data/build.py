"""From the flags to the rows of a phase: raw datasets, splits, tokens, cache.

Every rank calls the same function with the same arguments: the first to come builds, the others wait for
its lock and open what it published. There is no collective in here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from training.utils.data import fingerprint
from training.utils.data.arguments import DataArguments
from training.utils.data.cache import Log, open_or_build, silent
from training.utils.data.chat import ChatTokenizer, parts_of_chat
from training.utils.data.chat_rows import ChatRowMaker
from training.utils.data.dataset import CachedSplit
from training.utils.data.file_dataset import columns_for
from training.utils.data.parallel_thinking import parallel_tags, parts_of_parallel_thinking
from training.utils.data.phases import PHASE_NAMES, PromptRow, ResponsesRow, Row, SentenceRow
from training.utils.data.reports import BuildReport, Counts, SplitReport, nothing_left
from training.utils.data.row_makers import RowMaker
from training.utils.data.shards import SplitPlan, build_shards
from training.utils.data.sources import Portion, Source, choose_rows, open_sources, part_of
from training.utils.data.splits import parse_data_split
from training.utils.data.tokenize import TextTokenizer, require_pad_token
from training.utils.layout.parallel import ParallelTags
from training.utils.run.errors import ThreestepError

_ROW_TYPES: dict[int, type] = {1: SentenceRow, 2: ResponsesRow, 3: PromptRow}


@dataclass(frozen=True)
class PhaseData:
    """The rows that one phase trains on and those it is evaluated on."""

    train: CachedSplit
    eval: CachedSplit
    report: BuildReport


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
    say = log if log is not None and is_main_rank else silent
    parse_data_split(data.data_split)
    if phase in (2, 3):
        require_pad_token(tokenizer, f"phase {phase} ({PHASE_NAMES[phase]})")
    if phase == 3 and data.parallel_thinking:
        raise ThreestepError(
            "parallel_thinking: phase 3 samples responses token by token, every path seeing those before it, and "
            "learns from what it sampled; use it in phases 1 and 2"
        )
    tags = parallel_tags(data, tokenizer)
    texts = text_maker(data, tokenizer, tags)
    sources = open_sources(phase, data, seed)

    def build(folder: str) -> dict[str, Any]:
        return _build_splits(folder, phase, data, texts, sources, seed, say)

    plain = texts.texts if isinstance(texts, ChatTokenizer) else texts
    parts = _parts_of_phase(phase, data, tokenizer, plain, sources, seed) | parts_of_parallel_thinking(data, tags)
    cached = open_or_build(data.cache_dir, f"phase{phase}", parts, build, data.rebuild_cache, say)
    reports = {
        key: SplitReport(**{field.name: entry[field.name] for field in fields(SplitReport)})
        for key, entry in cached.manifest["splits"].items()
    }
    report = BuildReport(reports["train"], reports["eval"], cached.resumed)
    say(f"data: phase {phase}: {report.sentence}")
    return PhaseData(cached.splits["train"], cached.splits["eval"], report)


def text_maker(data: DataArguments, tokenizer: Any, tags: ParallelTags | None) -> TextTokenizer | ChatTokenizer:
    """What turns texts, or under a chat template conversations, into ids."""
    if data.prompt_style == "chat_template":
        return ChatTokenizer(data, tokenizer, tags)
    return TextTokenizer(tokenizer, data.end_of_conversation_token, tags)


def row_maker(
    phase: int, data: DataArguments, texts: TextTokenizer | ChatTokenizer, source: Source, counts: Counts
) -> RowMaker | ChatRowMaker:
    """What turns the raw rows of a source into rows of a phase."""
    if isinstance(texts, ChatTokenizer):
        return ChatRowMaker(phase, data, texts, source, counts)
    return RowMaker(phase, data, texts, source, counts)


def _parts_of_phase(
    phase: int,
    data: DataArguments,
    tokenizer: Any,
    texts: TextTokenizer,
    sources: Sequence[Source],
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
        "pick_rows": data.pick_rows,
        **fingerprint.parts_of_tokenizer(tokenizer),
        **parts_of_chat(data, tokenizer, phase),
        "ids before a prompt": str(texts.prefix_ids),
        "code": fingerprint.code_of_rows(),
    }
    if phase == 3:
        parts["max_prompt_seq_len"] = str(data.max_prompt_seq_len)
        parts["prompt_truncation"] = data.prompt_truncation
        parts["kept on request"] = json.dumps([data.return_raw_ids, data.return_raw_chat, data.return_full_prompt])
    else:
        parts["max_seq_len"] = str(data.max_seq_len)
        parts["truncation"] = data.truncation
        parts["end of conversation"] = str(texts.end_id)
    if phase == 1:
        parts["loss_on"] = data.loss_on
    if any(":" in source.name for source in sources):
        parts["columns"] = json.dumps([data.data_format, columns_for(phase, data)])
    for number, source in enumerate(sources):
        label = f"[{number}] {source.name}"
        parts[f"rows of {label}"] = fingerprint.content_of_dataset(source.raw, data.cache_dir)
        parts[f"class of {label}"] = fingerprint.code_of_class(type(source.raw))
    return parts


def _build_splits(
    folder: str,
    phase: int,
    data: DataArguments,
    texts: TextTokenizer | ChatTokenizer,
    sources: Sequence[Source],
    seed: int,
    say: Log,
) -> dict[str, Any]:
    """Write train.arrow and eval.arrow; returns what the manifest says of them."""

    def maker_of(portions: Sequence[Portion]) -> Callable[[int, int, Counts], Iterator[Row]]:
        def make(begin: int, end: int, counts: Counts) -> Iterator[Row]:
            for portion in part_of(portions, begin, end):
                maker = row_maker(phase, data, texts, portion.source, counts)
                yield from maker.rows(portion.rows, portion.indices, portion.first_row_id)

        return make

    chosen = choose_rows(phase, data, sources, seed)
    plans = [
        SplitPlan(key, _ROW_TYPES[phase], sum(len(portion.indices) for portion in portions), maker_of(portions))
        for key, portions in (("train", chosen.train), ("eval", chosen.eval))
    ]
    built = build_shards(folder, plans, data.num_workers, say)
    if built["train"].rows == 0:
        names, offered = [source.name for source in sources], plans[0].raw_rows
        raise ThreestepError(nothing_left(phase, data, names, offered, built["train"].counts))
    splits = {key: shards.join(os.path.join(folder, f"{key}.arrow")) for key, shards in built.items()}
    return {"phase": phase, "splits": splits, "sources": chosen.described}
