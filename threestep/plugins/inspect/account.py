"""An account of data before any training: of each source and of each phase.

The code that builds a run's rows makes them here too, with and without the limits on their length, from a sample of the
rows; nothing is cached. Where training would stop, the account holds its error message.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.inspect.views import Decode, document_of, layout_of, marked_runs
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user
from training.utils.contracts.rows import PHASE_NAMES, PromptRow, Row, TextBlock
from training.utils.data.build.portions import DataSource, Portion, divide_rows, open_sources
from training.utils.data.build.row_maker import RowMaker
from training.utils.data.cache.shards import Counts
from training.utils.data.chat.style import text_maker
from training.utils.data.files.columns import Kinds, note_kinds
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.data.kinds.table import kind_of
from training.utils.setup.media import has_media_kind, held_media, media_kind

if TYPE_CHECKING:
    from training.utils.contracts.drawing import OpenedForm
    from training.utils.contracts.media import MediaReader
    from training.utils.data.arguments import DataArguments, SplitArguments
    from training.utils.data.chat.chat import ChatTokenizer
    from training.utils.data.raw_dataset import Recognition
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.data.rows.tokenize import TextTokenizer

Run = tuple[str, bool]  # a text, and whether it carries loss

_NO_LIMIT_TOKENS = 2**40
_FIRST_ROWS = 20  # of a source, looked at for the kinds and examples of its columns
_LONGEST_EXAMPLE = 90
_ROWS_NAMED = 8


@dataclass(frozen=True)
class Column:
    """read_as: the role that it plays, such as "prompt"; None: it is not read (or a class decides)."""

    name: str
    kinds: list[str]
    read_as: str | None
    example: str


@dataclass(frozen=True)
class SourceAccount:
    """One entry of --data_path.

    recognised: None where a class reads the rows, or where they were refused.
    refused: why it cannot be used; None: it can.
    """

    name: str
    kind: str
    rows: int = 0
    own_evaluation_rows: int = 0
    recognised: Recognition | None = None
    columns: list[Column] = field(default_factory=list)
    refused: str | None = None


@dataclass(frozen=True)
class Lengths:
    """Lengths of whole rows, before anything is cut, and their statistics."""

    rows: list[int]
    least: int
    median: int
    p95: int
    most: int


@dataclass(frozen=True)
class LeftOutRow:
    """A row that is dropped, or at which training would stop. where: its file and line, or its source and index."""

    where: str
    reason: str


@dataclass(frozen=True)
class ShownRow:
    """A row as the model is fed it.

    index: in its source. tokens, whole_tokens: after and before it was cut.
    texts: its parts by name (phase 2: prompt, chosen, rejected), each in runs.
    input_ids, loss_mask: as they are laid out; empty where no tokenizer was given.
    others: values that a prompt of phase 3 carries besides, by name.
    media: of the row: kind, words, and the address of a small copy, which holds it.
    """

    source: str
    index: int
    where: str
    tokens: int
    whole_tokens: int
    texts: list[tuple[str, list[Run]]]
    input_ids: list[int]
    loss_mask: list[int]
    others: dict[str, Any]
    media: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class PhaseAccount:
    """The rows of one phase, and their figures.

    share_rows, all_rows: its training rows, out of those that all phases share; eval_rows: held out.
    shares: the same of each source, (name, share, all). share_flags: what decides on the share.
    looked_at: rows of the share that the figures below are from.
    targets: tokens that carry loss, out of `tokens`; loss: which these are, and why the others do not.
    dropped_rows, stopping_rows: some of the rows that are dropped, and of those (`stopping`) that would stop training.
    counted: other counts of the rows, by name.
    refused: why training would stop; None: it would not.
    """

    phase: int
    share_flags: str = ""
    share_rows: int = 0
    all_rows: int = 0
    eval_rows: int = 0
    shares: list[tuple[str, int, int]] = field(default_factory=list)
    looked_at: int = 0
    kept: int = 0
    cut: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_rows: list[LeftOutRow] = field(default_factory=list)
    stopping: int = 0
    stopping_rows: list[LeftOutRow] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    lengths: Lengths | None = None
    limit_tokens: int | None = None
    tokens: int = 0
    targets: int = 0
    loss: str = ""
    rows: list[ShownRow] = field(default_factory=list)
    refused: str | None = None

    @property
    def name(self) -> str:
        """E.g. `supervised fine-tuning`."""
        return PHASE_NAMES[self.phase]

    @property
    def limit_flag(self) -> str:
        """The flag that limits the length of its rows."""
        return f"--{kind_of(self.phase).limit}"


@dataclass(frozen=True)
class Account:
    """style: the form of prompts and responses, in one sentence. unit: of lengths."""

    sources: list[SourceAccount]
    phases: list[PhaseAccount]
    style: str
    unit: str

    @property
    def refused(self) -> str | None:
        """The reason why nothing can be trained on this data: a source is refused, or every phase is."""
        of_sources = [source.refused for source in self.sources if source.refused]
        if of_sources or not self.phases or any(phase.refused is None for phase in self.phases):
            return next(iter(of_sources), None)
        return max(self.phases, key=lambda phase: phase.share_rows > 0).refused


@dataclass(frozen=True)
class Look:
    """The extent of an inspection. rows: shown of each phase; most_rows: looked at in each; seed: of the run;
    unread: why media of rows are not read, if they are not."""

    phases: Sequence[int]
    rows: int
    most_rows: int
    seed: int
    unread: str = ONLY_TEXT


def account_of(
    data: DataArguments,
    look: Look,
    tokenizer: Any,
    style: str | Callable[[Sequence[Row]], str],
    *,
    has_ids: bool,
    reader: MediaReader | None = None,
) -> Account:
    """Look at the sources and the phases. style: in one sentence, or the function that makes it from the rows of the
    first phase that has any. has_ids: tokens are a model's, not characters. reader: of media; None where the model
    reads text alone."""
    opened = [_open_source(each, look, reader is not None) for each in _one_by_one(data)]
    sources = [source for _, source in opened if source is not None]
    phases: list[PhaseAccount] = []
    rows: Sequence[Row] = ()
    if all(account.refused is None for account, _ in opened):
        for phase in look.phases:
            seen = _PhaseLook(phase, data, look, tokenizer, has_ids=has_ids, reader=reader)
            phases.append(seen.account(sources))
            rows = rows or seen.rows
    unit = "tokens" if has_ids else "characters"
    style = style if isinstance(style, str) else style(rows)
    return Account([account for account, _ in opened], phases, style, unit)


# Sources.


def _one_by_one(data: DataArguments) -> Iterator[DataArguments]:
    """The data flags with each entry alone, so that a mistake names its entry."""
    for name in data.source.data_path:
        yield replace(data, source=replace(data.source, data_path=[name], sft_only_data_path=[]))
    for name in data.source.sft_only_data_path:
        yield replace(data, source=replace(data.source, data_path=[], sft_only_data_path=[name]))


def _open_source(data: DataArguments, look: Look, reads_media: bool) -> tuple[SourceAccount, DataSource | None]:
    (name,) = [*data.source.data_path, *data.source.sft_only_data_path]
    account = SourceAccount(name, "unknown")
    try:
        (source,) = open_sources(1, data, look.seed)
        raw = source.raw
        raw.expect_media(reads_media, look.unread)
        by_format = type(raw).__name__ == "FileDataset"
        account = replace(account, kind="its columns" if by_format else f"the class {type(raw).__name__}")
        rows, held_out = call_user(raw.get_train_data), call_user(raw.get_eval_data)
        account = replace(account, rows=len(rows), own_evaluation_rows=len(held_out or ()))
        account = replace(account, columns=_columns(rows, None))
        recognised = raw.get_recognition()
        return replace(account, recognised=recognised, columns=_columns(rows, recognised)), source
    except ThreestepError as refusal:
        return replace(account, refused=str(refusal)), None


def _columns(rows: Sequence[Any], recognised: Recognition | None) -> list[Column]:
    """The columns of rows that are objects, with the first value of each that is not null."""
    first = [rows[place] for place in range(min(len(rows), _FIRST_ROWS))]
    kinds: Kinds = dict(getattr(rows, "kinds", {}))
    examples: dict[str, Any] = {}
    for row in first:
        if isinstance(row, Mapping):
            note_kinds(kinds, row, "")
            examples |= {name: value for name, value in row.items() if value is not None and name not in examples}
    roles: dict[str, list[str]] = {}
    for column, role in (recognised.read if recognised else {}).items():
        head = column if column in kinds else column.partition(".")[0]
        roles.setdefault(head, []).append(role if head == column else f"{role} ({column})")
    return [
        Column(name, list(found), ", ".join(roles.get(name, [])) or None, _example(examples.get(name)))
        for name, found in kinds.items()
    ]


def _example(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_EXAMPLE else f"{text[:_LONGEST_EXAMPLE]}…"


# Phases.


@dataclass(frozen=True, eq=False)
class _Taken:
    """A row that was made: its portion, its index, and its length before it was cut."""

    row: Row
    portion: Portion
    index: int


# Why a row is left out, in words.
REASONS = {
    "no_prompt": "it has no prompt",
    "no_chosen": "it has no response",
    "no_response": "one of its ranked responses is missing",
    "no_rejected": "it has no rejected response, but a pair needs one",
    "empty_prompt": "its prompt is empty or blank",
    "empty_response": "a response is empty or blank",
    "identical_responses": "its responses are identical, so neither is better",
    "response_of_several_messages": "a response of a pair has more than one message",
    "no_assistant_turn": "it has no assistant message",
    "no_turn_to_train": "its `weight` removes every assistant turn from the loss",
    "unread_reasoning": "the chat template omits the reasoning of its answer",
    "bad_conversation": "the chat template refuses it (--bad_conversations drop)",
    "prompt_no_prefix_of_the_response": "the template writes the prompt differently when a response follows",
    "marked_bad": "its response is marked as bad, so it must not be learned",
    "unpaired": "its single response is marked good or bad, but a pair needs two",
    "too_long": "it is longer than --max_seq_len (--truncation drop)",
    "prompt_too_long": "its prompt is longer than --max_prompt_seq_len (--prompt_truncation drop)",
    "response_cut_to_nothing": "its prompt alone is longer than --max_seq_len",
    "no_room_for_the_prompt": "its response alone is as long as --max_seq_len",
    "malformed_parallel": "its parallel-thinking tags do not match (--malformed_parallel drop)",
    "cut_inside_a_block": "it would be cut inside a parallel-thinking block",
}


def in_words(reason: str) -> str:
    """The reason why a row is left out."""
    of_media = media_kind().why_dropped if reason not in REASONS and has_media_kind() else {}
    return {**REASONS, **of_media}.get(reason, reason.replace("_", " "))


class _PhaseLook:
    """Makes the rows of one phase, as training would."""

    def __init__(
        self, phase: int, data: DataArguments, look: Look, tokenizer: Any, *, has_ids: bool, reader: MediaReader | None
    ) -> None:
        self._phase, self._kind = phase, kind_of(phase)
        self._data = data
        self._look = look
        self._tokenizer = tokenizer
        self._has_ids = has_ids
        self._media = None if reader is None else held_media(reader, data.forms)
        self.rows: Sequence[Row] = ()  # that training would have, after `account`

    def account(self, sources: Sequence[DataSource]) -> PhaseAccount:
        account = PhaseAccount(
            self._phase,
            share_flags=_share_flags(self._data.split.of_phase(self._phase)),
            loss=_loss(self._phase, self._data),
        )
        sources = [source for source in sources if self._phase == 1 or not source.sft_only]
        try:
            shared = divide_rows(self._phase, self._data.split, sources, self._look.seed)
            account = self._shares(account, shared.train, shared.eval)
            if account.share_rows == 0:
                raise ThreestepError(f"step {self._phase} gets no rows: {account.share_flags} assigns it none")
            portions = self._sampled(shared.train)
            account = replace(account, looked_at=sum(len(portion.indices) for portion in portions))
            _ = self._text_maker  # what is wrong with the style is wrong with every row
            return self._rows_that_pass(account, portions)
        except ThreestepError as refusal:
            return replace(account, refused=str(refusal))

    def _rows_that_pass(self, account: PhaseAccount, portions: Sequence[Portion]) -> PhaseAccount:
        """The rows, but for those at which training would stop."""
        try:
            return self._rows(account, portions)
        except ThreestepError as refusal:
            stopping: list[LeftOutRow] = []
            passing = []
            for portion in portions:
                found = [self._why_it_stops(portion, int(index)) for index in portion.indices]
                rows = zip(portion.indices, found, strict=True)
                stopping += [LeftOutRow(_where(portion, int(index)), why) for index, why in rows if why is not None]
                passing.append(replace(portion, indices=portion.indices[[why is None for why in found]]))
            account = replace(account, stopping=len(stopping), stopping_rows=stopping[:_ROWS_NAMED])
            return replace(self._rows(account, passing), refused=str(refusal))

    def _why_it_stops(self, portion: Portion, index: int) -> str | None:
        try:
            for _ in self._made([replace(portion, indices=np.array([index]))], self._limits, Counts()):
                pass
        except ThreestepError as refusal:
            named = (f"dataset '{portion.source.name}', row {index}", _where(portion, index))
            sentence = str(refusal)
            for where in named:  # which stands beside the sentence
                sentence = sentence.removeprefix(where)
            return sentence.lstrip(",: ")
        return None

    def _shares(self, account: PhaseAccount, train: Sequence[Portion], held_out: Sequence[Portion]) -> PhaseAccount:
        eval_rows = sum(len(portion.indices) for portion in held_out)
        shares = []
        for portion, other in zip(train, held_out, strict=True):
            carved = len(other.indices) if other.rows is portion.rows else 0
            shares.append((portion.source.name, len(portion.indices), len(portion.rows) - carved))
        share_rows, all_rows = sum(share for _, share, _ in shares), sum(every for _, _, every in shares)
        return replace(account, share_rows=share_rows, all_rows=all_rows, eval_rows=eval_rows, shares=shares)

    def _sampled(self, portions: Sequence[Portion]) -> list[Portion]:
        """At most `most_rows` rows of the portions, each keeping its share, in their order."""
        total = sum(len(portion.indices) for portion in portions)
        share = min(1.0, self._look.most_rows / max(total, 1))
        sampled = []
        for portion in portions:
            count = min(len(portion.indices), max(1, round(share * len(portion.indices))))
            places = sorted(random.Random(self._look.seed).sample(range(len(portion.indices)), count))  # noqa: S311
            sampled.append(replace(portion, indices=portion.indices[places]))
        return sampled

    def _rows(self, account: PhaseAccount, portions: Sequence[Portion]) -> PhaseAccount:
        limits, unlimited = self._limits, self._unlimited
        whole = {taken.row.row_id: taken.row.length_tokens for taken in self._made(portions, unlimited, Counts())}
        limit = getattr(self._data.rows, self._kind.limit)
        account = replace(account, lengths=_lengths(list(whole.values())))
        counts = Counts()
        kept = list(self._made(portions, limits, counts))
        self.rows = [taken.row for taken in kept]
        if not kept:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.dropped.items()))
            account = replace(account, refused=f"step {self._phase} has no training rows: all are dropped ({reasons})")
        return replace(
            account,
            kept=len(kept),
            cut=counts.truncated,
            dropped=dict(counts.dropped),
            dropped_rows=self._dropped_rows(portions, kept, limits),
            counted=_counted(counts, self._has_ids),
            limit_tokens=limit if self._has_ids else None,
            tokens=sum(taken.row.length_tokens for taken in kept),
            targets=sum(document_of(taken.row).targets for taken in kept),
            rows=[self._shown(taken, whole[taken.row.row_id]) for taken in _spread(kept, self._look.rows)],
        )

    def _made(self, portions: Sequence[Portion], limits: RowArguments, counts: Counts) -> Iterator[_Taken]:
        data = replace(self._data, rows=limits)
        for portion in portions:
            maker = RowMaker(
                self._kind, data, self._text_maker, portion.source, counts=counts, form=self._form, media=self._media
            )
            for row in maker.rows(portion.rows, portion.indices, portion.first_row_id):
                yield _Taken(row, portion, row.row_id - portion.first_row_id)

    @property
    def _unlimited(self) -> RowArguments:
        return replace(self._data.rows, max_seq_len=_NO_LIMIT_TOKENS, max_prompt_seq_len=_NO_LIMIT_TOKENS)

    @property
    def _limits(self) -> RowArguments:
        """The limits of the run, which count tokens."""
        return self._data.rows if self._has_ids else self._unlimited

    @cached_property
    def _text_maker(self) -> TextTokenizer | ChatTokenizer:
        return text_maker(self._data.chat, self._tokenizer)

    @cached_property
    def _form(self) -> OpenedForm | None:
        return self._data.opened_form(self._tokenizer)

    def _dropped_rows(
        self, portions: Sequence[Portion], kept: Sequence[_Taken], limits: RowArguments
    ) -> list[LeftOutRow]:
        """Some of the rows that are left out, of each reason at least one among the first."""
        found: list[LeftOutRow] = []
        kept_ids = {taken.row.row_id for taken in kept}
        for portion in portions:
            for index in map(int, portion.indices):
                if portion.first_row_id + index in kept_ids or len(found) == _ROWS_NAMED:
                    continue
                counts = Counts()
                for _ in self._made([replace(portion, indices=np.array([index]))], limits, counts):
                    pass
                found.append(LeftOutRow(_where(portion, index), next(iter(counts.dropped), "unknown")))
        return found

    def _shown(self, taken: _Taken, whole_tokens: int) -> ShownRow:
        row, decode = taken.row, self._decode
        layout = layout_of(document_of(row))
        ids, mask = layout["input_ids"], layout["loss_mask"]
        others: dict[str, Any] = {}
        if isinstance(row, PromptRow):
            others = {"reference": row.reference, **row.columns}
        return ShownRow(
            taken.portion.source.name,
            taken.index,
            _where(taken.portion, taken.index),
            row.length_tokens,
            whole_tokens,
            marked_runs(row, decode),
            ids if self._has_ids else [],
            mask if self._has_ids else [],
            others,
            self._shown_media(row),
        )

    def _shown_media(self, row: Row) -> list[tuple[str, str, str]]:
        if self._media is None or isinstance(row, TextBlock):
            return []
        return [(medium.kind, medium.words, medium.uri()) for medium in self._media.seen.shown(row.media)]

    @cached_property
    def _decode(self) -> Decode:
        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        return decode if self._media is None else self._media.reader.counting(decode)


def _loss(phase: int, data: DataArguments) -> str:
    """The tokens that carry loss."""
    if phase == 2:
        return "the responses, for DPO; a reward model scores the last token of each"
    if phase == 3:
        return "none on prompts: PPO learns from the responses that it samples"
    if data.rows.loss_on == "conversation":
        return "all but the first of a row (--loss_on conversation)"
    turns = "last response" if data.chat.train_turns == "last" else "responses"
    return f"the {turns} and the tokens that end them; none on prompts and template text"


def _share_flags(split: SplitArguments) -> str:
    most = split.max_train_rows
    return f"--data_split {split.data_split}" + ("" if most is None else f" --max_train_rows {most}")


def _counted(counts: Counts, has_ids: bool) -> dict[str, int]:
    """Further counts by their names; ends of responses depend on the model, and are unknown without one."""
    found = {f"rows: {what}": count for what, count in [*counts.noted.items(), *counts.parallel.items()]}
    if has_ids:
        found |= {f"responses end with {token}": count for token, count in counts.ends.items()}
        found |= {f"times {token} occurs inside a response": count for token, count in counts.inside.items()}
    return found


def _where(portion: Portion, index: int) -> str:
    return getattr(portion.rows[index], "where", f"{portion.source.name}, row {index}")


def _spread(kept: Sequence[_Taken], most: int) -> list[_Taken]:
    """At most `most` rows, evenly spaced from the first to the last."""
    if len(kept) <= most:
        return list(kept)
    return [kept[int(place)] for place in np.linspace(0, len(kept) - 1, most)] if most else []


def _lengths(tokens: list[int]) -> Lengths | None:
    if not tokens:
        return None
    median, p95 = (int(number) for number in np.percentile(tokens, (50, 95), method="higher"))
    return Lengths(tokens, min(tokens), median, p95, max(tokens))
