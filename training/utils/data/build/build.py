"""From the flags to rows of one kind: raw datasets, splits, tokens, cache.

Every rank calls the same function with the same arguments: the first builds, the others wait for its lock and open the
published folder. There are no collectives. The rows of a run without a chat template show its prompt style: it is saved
with the model, which is then asked in it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PHASE_NAMES, PromptRow, ResponsesRow, Row
from training.utils.data import fingerprint
from training.utils.data.arguments import parse_data_split
from training.utils.data.build.portions import (
    DataSource,
    Portion,
    Portions,
    divide_rows,
    open_sources,
    part_of,
    rows_sentence,
)
from training.utils.data.build.row_maker import RowMaker
from training.utils.data.cache.cache import Log, is_built, open_or_build, silent
from training.utils.data.cache.shards import BuildReport, Counts, SplitPlan, SplitReport, build_shards, join_splits
from training.utils.data.cache.workers import BuildStopped
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.chat.style import SavedStyle, parts_of_chat, save_style, saved_style, text_maker
from training.utils.data.chat.unread import REMEDIES as UNREAD_REMEDIES
from training.utils.data.file_dataset import POINTER, columns_for
from training.utils.data.files.columns import column_names
from training.utils.data.files.readers import split_reader
from training.utils.data.fingerprint import ROWS
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.data.formats.messages import FRAME
from training.utils.data.kinds.table import kind_of
from training.utils.data.raw_dataset import NOT_READ
from training.utils.data.rows.arguments import AS_STORED, CHAT_TEMPLATE, HUMAN_ASSISTANT
from training.utils.data.rows.dataset import row_hashes
from training.utils.data.rows.tokenize import TextTokenizer, named_tokenizer, require_pad_token

if TYPE_CHECKING:
    from training.utils.contracts.media import MediaReader, SeenMedia
    from training.utils.data.arguments import CacheArguments, DataArguments
    from training.utils.data.chat.style import PromptStyle
    from training.utils.data.kinds.kind import RowKind
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.data.rows.dataset import CachedSplit
    from training.utils.data.rows.media_store import GrowingStore

_MOST_LOOKED_AT = 1000  # rows, for the prompt style
_BEGINS = ("Human:", "System:", "Tools:")
_ASKS = "Assistant:"
_FRAME = re.compile(rf"(\s*)(?:{'|'.join(_BEGINS)}).*?(\s*{_ASKS}\s*)", re.DOTALL)
_FORMS = {HUMAN_ASSISTANT: "use 'Human: ... Assistant:'", AS_STORED: "use prompts as stored"}
_TRAINED = "also trained on"
_MADE_BY = {
    HUMAN_ASSISTANT: "--data_format question_answer --prompt_column prompt --chosen_column chosen --rejected_column "
    "rejected",
    AS_STORED: "--prompt_column question --chosen_column answer --rejected_column rejected",
}
# Part of the fingerprint of rows in which conversations that end with a question are learnt up to their last answer.
_ANSWERS_KEPT = {"conversations that end with a question": "their last answer"}


@dataclass(frozen=True)
class PhaseData:
    """The rows that one phase trains on and those it is evaluated on.

    seen: the media of the rows; None without any.
    """

    train: CachedSplit
    eval: CachedSplit
    report: BuildReport
    seen: SeenMedia | None = None


def build_phase(
    rows: str | int,
    data: DataArguments,
    tokenizer: Any,
    seed: int,
    *,
    is_main_rank: bool = True,
    log: Log | None = None,
    media: MediaReader | None = None,
    unread: str = ONLY_TEXT,
) -> PhaseData:
    """Tokenized rows, from the cache or built now; `log` gets lines on the main rank only.

    rows: the name of their kind, or a phase, 1, 2 or 3, for the kind that it trains on
    media: reads those of the rows; None where the model reads text alone. unread: why it does, for the sentence.
    Raises ThreestepError for mistakes in the data or the flags.
    """
    log = log if log is not None and is_main_rank else silent
    kind = kind_of(rows)
    phase = kind.phase
    data = replace(data, split=data.split.of_phase(phase))
    if kind.needs_pad:
        require_pad_token(tokenizer.pad_token_id, f"step {phase} ({PHASE_NAMES[phase]})", named_tokenizer(tokenizer))
    form = data.opened_form(tokenizer)
    texts = text_maker(data.chat, tokenizer)
    plain = texts.texts if isinstance(texts, ChatTokenizer) else texts
    sources = open_sources(phase, data, seed)
    for source in sources:
        source.raw.expect_media(media is not None, unread)

    def build(folder: str) -> dict[str, Any]:
        keeps = _ANSWERS_KEPT.items() <= parts.items()
        shared = divide_rows(phase, data.split, [replace(source, keeps_answers=keeps) for source in sources], seed)
        maker = partial(RowMaker, kind, data, texts, form=form)
        return _build_splits(folder, kind, data, maker, shared=shared, media=media, log=log)

    try:
        parts = _parts_of_rows(kind, data, tokenizer, plain, sources=sources, seed=seed)
        parts |= {} if form is None else form.parts
        if media is not None:
            parts |= media.parts_of_rows(data.forms)
        name = f"phase{kind.key}"
        if kind.weighs_messages and texts is plain and _is_new_to_cache(name, parts, data.cache, sources):
            parts |= _ANSWERS_KEPT
        cached = open_or_build(data.cache.cache_dir, name, parts, build, rebuild=data.cache.rebuild_cache, log=log)
    except BuildStopped:  # by the disk, not by the data
        raise
    except ThreestepError as refusal:
        raise ThreestepError(f"{refusal}; {POINTER}") from refusal
    entries = cached.manifest["splits"]
    report = BuildReport(SplitReport.of(entries["train"]), SplitReport.of(entries["eval"]), cached.resumed)
    for sentence in _account(kind, data, cached.manifest["sources"], report):
        log(sentence)
    stored, seen = cached.splits["train"].stored_media, None
    if media is not None and stored is not None:
        log(f"data: {media.sentence}")
        seen = media.of_stored(stored)
    return PhaseData(cached.splits["train"], cached.splits["eval"], report, seen)


def _is_new_to_cache(name: str, parts: dict[str, str], cache: CacheArguments, sources: Sequence[DataSource]) -> bool:
    """True if rows may be conversations that end with a question, and no earlier version, which left such rows out of
    texts, has built them: its caches are read as they are."""
    if not cache.rebuild_cache and is_built(cache.cache_dir, name, parts):
        return False
    if not cache.rebuild_cache and is_built(cache.cache_dir, name, {**parts, **_ANSWERS_KEPT}):
        return True
    return any(source.raw.may_end_unanswered() for source in sources)


def _account(
    kind: RowKind, data: DataArguments, described: Sequence[dict[str, Any]], report: BuildReport
) -> Iterator[str]:
    """Lines on how the sources are read, and on the rows that are kept, cut and left out."""
    for source in described:
        if source["recognised"] is not None:
            yield f"data: {source['name']}: {_read_sentence(source['recognised'], kind.carries_columns)}"
            for note in source["recognised"].get("notes", ()):  # earlier versions' caches have none
                yield f"data: {source['name']}: {note}"
    yield rows_sentence(kind.phase, data.split, described, report.train)
    yield f"data: step {kind.phase}: {report.sentence}"
    for sentence in warnings_of(kind, data.rows, report):
        yield f"warning: {sentence}"


def _read_sentence(recognised: Mapping[str, Any], carries: bool) -> str:
    """The recognition's sentence. carries: columns that are not read as text are handed to rewards"""
    read, _, _ = recognised["sentence"].partition(NOT_READ)
    others = [*recognised["texts_not_read"], *recognised["others_not_read"]]
    return f"{read}; for rewards: {column_names(others)}" if carries and others else recognised["sentence"]


def warnings_of(kind: RowKind, flags: RowArguments, report: BuildReport) -> Iterator[str]:
    """A sentence for each split with rows that were cut at the maximum length, with their share; then for each with
    rows of which the chat template leaves something out, with the remedy."""
    limit, how = kind.limit, kind.truncation
    splits = (("training", report.train), ("evaluation", report.eval))
    for name, split in splits:
        if split.truncated:
            yield (
                f"{split.truncated:,} of {split.rows:,} {name} rows ({split.truncated / split.rows:.1%}) were cut at "
                f"--{limit} {getattr(flags, limit):,} tokens (--{how} {getattr(flags, how)}); raise the limit to train "
                f"on whole rows, or use --{how} drop"
            )
    for name, split in splits:
        for note, remedy in {**UNREAD_REMEDIES, _TRAINED: "remove them from the training rows"}.items():
            if note in split.noted:
                yield f"{split.noted[note]:,} {name} rows{' are' if note == _TRAINED else ':'} {note}; {remedy}"


def _parts_of_rows(
    kind: RowKind,
    data: DataArguments,
    tokenizer: Any,
    texts: TextTokenizer,
    *,
    sources: Sequence[DataSource],
    seed: int,
) -> dict[str, str]:
    """Everything that the rows depend on, in clear; long values as hashes."""
    parts = {
        "datasets": json.dumps([(source.name, source.sft_only) for source in sources]),
        "phase": kind.key,
        "data_split": ",".join(str(weight) for weight in parse_data_split(data.split.data_split)),
        "seed": str(seed),
        "eval_fraction": str(data.split.eval_fraction),
        "max_train_rows": str(data.split.max_train_rows),
        "max_eval_rows": str(data.split.max_eval_rows),
        "pick_rows": "random",  # of earlier versions, whose caches are found by it
        **fingerprint.parts_of_tokenizer(tokenizer),
        **parts_of_chat(data.chat, tokenizer, kind.weighs_messages),
        "ids before a prompt": str(texts.prefix_ids),
        "code": ROWS,
        **kind.parts(data.rows, texts),
    }
    if any(split_reader(source.name) for source in sources):
        parts["columns"] = json.dumps([data.source.data_format, columns_for(kind.columns, data.source)])
    for number, source in enumerate(sources):
        label = f"[{number}] {source.name}"
        parts[f"rows of {label}"] = fingerprint.content_of_dataset(source.raw, data.cache.cache_dir)
        parts[f"class of {label}"] = fingerprint.code_of_class(type(source.raw))
    return parts


def _build_splits(
    folder: str,
    kind: RowKind,
    data: DataArguments,
    maker: Callable[..., RowMaker],
    *,
    shared: Portions,
    media: MediaReader | None,
    log: Log,
) -> dict[str, Any]:
    """Write train.arrow, eval.arrow and the media of both; returns their part of the manifest. maker: of a source, with
    `counts` and `media`"""

    def maker_of(portions: Sequence[Portion]) -> Callable[[int, int, Counts, GrowingStore], Iterator[Row]]:
        def make(begin: int, end: int, counts: Counts, store: GrowingStore) -> Iterator[Row]:
            read = None if media is None else media.of_rows(store, data.forms)
            for portion in part_of(portions, begin, end):
                made = maker(portion.source, counts=counts, media=read)
                yield from made.rows(portion.rows, portion.indices, portion.first_row_id)

        return make

    plans = [
        SplitPlan(key, kind.record, sum(len(portion.indices) for portion in portions), maker_of(portions))
        for key, portions in (("train", shared.train), ("eval", shared.eval))
    ]
    built = build_shards(folder, plans, data.cache.num_workers, log)
    if built["train"].rows == 0:
        raise ThreestepError(_nothing_left(kind, data, shared, offered=plans[0].raw_rows, counts=built["train"].counts))
    joined = join_splits(folder, built)
    hashes = {key: row_hashes(os.path.join(folder, f"{key}.arrow")) for key in joined["splits"]}
    for key, entry in joined["splits"].items():
        entry["duplicates"] = len(hashes[key]) - len(np.unique(hashes[key]))
    if trained := int(np.isin(hashes["eval"], hashes["train"]).sum()):
        given = any(source["own_evaluation_rows"] for source in shared.described)
        joined["splits"]["eval"]["noted"][_TRAINED if given else "equal to a training row"] = trained
    return {"phase": kind.phase, **joined, "sources": shared.described}


def _nothing_left(kind: RowKind, data: DataArguments, shared: Portions, *, offered: int, counts: Counts) -> str:
    """Why there are no training rows though the sources offered `offered` of them."""
    names = ", ".join(f"'{source['name']}'" for source in shared.described)
    start = f"step {kind.phase} ({PHASE_NAMES[kind.phase]}) has no training rows: "
    if offered == 0:
        return start + (
            f"data_split {data.split.data_split} gives it no rows from {names}; raise its share or use more data"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
    hints = {**kind.hints, **UNREAD_REMEDIES, **({} if data.form is None else data.form.hints)}
    hint = next((f"; {advice}" for reason, advice in hints.items() if reason in counts.dropped), "")
    if not hint and set(counts.dropped) & {"too_long", "prompt_too_long", "response_cut_to_nothing"}:
        hint = f"; raise --{kind.limit} or change --{kind.truncation}"
    return start + f"all {offered} rows of {names} were dropped ({reasons}){hint}"


# The prompt style that rows have.


def settle_style(style: PromptStyle, rows: Sequence[Any], tokenizer: Any, log: Log, *, most_tokens: int) -> PromptStyle:
    """Return the style, of the two without a template the one that the rows have where no flag names one; write it into
    `tokenizer`, and log it. Rows of the other one are a warning.

    most_tokens: at which rows were cut. The same rows give the same style on every rank.
    """
    if style.chat.prompt_style == CHAT_TEMPLATE:
        return style
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_LOOKED_AT)).astype(int))
    prompts = [_prompt_of(rows[int(place)], tokenizer, most_tokens) for place in places]
    of_form = {form: [prompt for own, prompt in prompts if own == form] for form in _FORMS}
    if style.is_open and prompts:
        style = _decided(style, max(_FORMS, key=lambda form: len(of_form[form])))
    name = style.chat.prompt_style
    begin, end = ("", _shared_end(of_form[name])) if name == AS_STORED else _shared_frame(of_form[name])
    before, now = saved_style(tokenizer), replace(SavedStyle.of(style.chat), prompt_begin=begin, prompt_end=end)
    save_style(tokenizer, now)
    if name == HUMAN_ASSISTANT == style.saved_as and before and before.frame != now.frame:
        rows, model = (repr("Human: ...".join(one.frame)) for one in (now, before))
        log(f"warning: the rows' prompts are {rows}, but the model was trained on {model}; use one form for all rows")
    if style.is_open:
        log(style.sentence)
    [other] = [form for form in _FORMS if form != name]
    if of_form[other]:
        advice = "use one form for all rows" if of_form[name] else f"--prompt_style {other} matches the rows"
        log(
            f"warning: {len(of_form[other]):,} of {len(prompts):,} inspected rows {_FORMS[other]}, but the model is "
            f"saved with the style {name}, so its prompts will look different; {advice}"
        )
    return style


def _decided(style: PromptStyle, found: str) -> PromptStyle:
    """The style of the rows, with the reason."""
    rows = f"the rows {_FORMS[found]}"
    if style.saved_as is None:
        reason = f"{style.reason}, and {rows}"
    elif style.saved_as == found:
        reason = style.reason
    else:
        flags = _MADE_BY.get(style.saved_as, f"--prompt_style {style.saved_as}")
        reason = f"{rows}, but the model was trained with {style.saved_as}; to read rows in that style: {flags}"
    return replace(style, chat=replace(style.chat, prompt_style=found), reason=reason)


def _prompt_of(row: Any, tokenizer: Any, most_tokens: int) -> tuple[str, str]:
    """The style of a row, and its prompt: "" of a row that is one text. most_tokens: at which its beginning may be
    cut."""

    def text(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    whole = ""
    if isinstance(row, PromptRow):
        prompt = row.prompt_text
    elif isinstance(row, ResponsesRow):
        prompt = text(row.prompt_ids)
    else:
        begin = int(np.argmax(row.loss_mask))
        # With the loss on the whole conversation, all but the first token has some.
        prompt, whole = text(row.input_ids[: begin if begin > 1 else 0]), text(row.input_ids)
    if prompt.strip():
        is_cut = not isinstance(row, PromptRow) and row.length_tokens >= most_tokens
        begins = is_cut or prompt.lstrip().startswith(_BEGINS)
        is_wrapped = begins and prompt.rstrip().endswith(_ASKS)
    else:
        prompt, asks, _ = whole.partition(_ASKS)
        is_wrapped = prompt.lstrip().startswith(_BEGINS) and bool(asks)
        prompt = prompt + asks if is_wrapped else ""
    return HUMAN_ASSISTANT if is_wrapped else AS_STORED, prompt


def _shared_frame(prompts: Sequence[str]) -> tuple[str, str]:
    """The text of most prompts before "Human:" and behind the question; each "" if it is as usual."""
    found = Counter(match.groups() for prompt in prompts if (match := _FRAME.fullmatch(prompt)))
    begin, end = max(found, key=found.__getitem__, default=FRAME)
    return begin, "" if end == FRAME[1] else end


def _shared_end(prompts: Sequence[str]) -> str:
    """The white space with which every prompt ends; "" where they end in several ways."""
    ends = {prompt[len(prompt.rstrip()) :] for prompt in prompts if prompt.strip()}
    return ends.pop() if len(ends) == 1 else ""
