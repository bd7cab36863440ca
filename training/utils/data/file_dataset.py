"""Rows without a class as raw datasets: `jsonl:PATH`, `json:`, `csv:`, `parquet:`, `arrow:` and `hub:OWNER/NAME`; the
raw dataset of any `--data_path` entry, and a first look at it.

Joins a reader of rows (`readers`) and a format (`formats`). Texts are used as stored, so a response that should begin
with a space is stored with it; messages are also available as DeepSpeed-Chat's text (`messages`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.base.hub import check_hub
from training.utils.base.user_files import call_user, check_signature
from training.utils.data.files.columns import FileRow, column_names, kind_of
from training.utils.data.files.content import is_remote
from training.utils.data.files.json_rows import nulls_sentence
from training.utils.data.files.readers import STORES, check_stored, files_of, split_reader, stored_rows
from training.utils.data.formats.formats import FileColumns, Format, has_column, missing_column, recognise
from training.utils.data.formats.media import IMAGE_COLUMNS, check_media, check_text_parts, media_columns
from training.utils.data.formats.messages import (
    Message,
    from_json,
    image_values,
    prompt_text,
    read_tools,
    response_text,
)
from training.utils.data.formats.records import Record, TreeRows, holds_trees, read_mark, value_of
from training.utils.data.raw_dataset import PromptRawDataset, Recognition
from training.utils.data.registry import find_dataset, load_dataset_module, where
from training.utils.flags.added import advice

if TYPE_CHECKING:
    from training.utils.data.arguments import SourceArguments
    from training.utils.data.files.readers import Rows

POINTER = "threestep inspect with the same data flags shows how the rows are read"
_MOST_BYTES = 32 << 20  # read in about a second; larger files are read once, by the build
_REWARD_MODEL, _GROUND_TRUTH = "reward_model", "ground_truth"  # verl's column, and the reference in it
_EXTRA_INFO, _IN_EXTRA_INFO = "extra_info", ("index", "tools_kwargs", "interaction_kwargs")  # verl's, too
_MAY_HOLD_TEXT = ("text", "a list", "an object")
_TEMPLATE_KWARGS, _THINKING = "chat_template_kwargs", "enable_thinking"


class FileDataset(PromptRawDataset):
    """The files, or the hub's dataset, of one `--data_path` entry; listed now, opened when rows are read."""

    def __init__(self, name: str, columns: FileColumns, data_format: str | None, output_path: str | None) -> None:
        self.dataset_name = name
        self.dataset_clean_name = name.replace("/", "_").replace(":", "_")
        self.output_path = output_path or ""
        stored = stored_rows(name, "data_path", output_path)
        assert stored is not None, f"{name} names no reader"
        self._stored = stored
        self._address = stored.address
        self._columns = columns
        self._named_format = data_format
        self._last: tuple[Any, Record] | None = None

    # The rows.

    def get_train_data(self) -> Sequence[FileRow]:
        return self._opened[0]

    def get_eval_data(self) -> Sequence[FileRow] | None:
        """The rows of a folder's files named test, validation or eval..., if others are named train..."""
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[Rows | TreeRows, Rows | TreeRows | None]:
        train, held_out = self._stored.open()
        if not len(train):
            raise ThreestepError(
                f"dataset '{self.dataset_name}' is empty: it has no training rows; expected at least one"
            )
        if not holds_trees(train.kinds) or self._named_format not in (None, "messages") or self._columns.deciding:
            return train, held_out
        return TreeRows(train), TreeRows(held_out) if held_out and holds_trees(held_out.kinds) else held_out

    def get_fingerprint(self) -> str:
        return self._stored.fingerprint()

    # Their content.

    @cached_property
    def format(self) -> Format:
        """The format of the files, recognised by their columns or named by flags."""
        train, held_out = self._opened
        recognised = recognise(train.kinds, self._columns, self._named_format, self._address)
        if held_out:
            recognise(held_out.kinds, self._columns, recognised.name, self._address)
        return replace(recognised, why=train.sentence) if isinstance(train, TreeRows) else recognised

    def get_recognition(self) -> Recognition:
        kinds, columns = self._opened[0].kinds, self._columns
        further = [(columns.tools or "tools", "tools"), (_TEMPLATE_KWARGS, "template variables")]
        further += [(_THINKING, "a template variable"), (columns.margin or "", "margin")]
        references = (columns.reference,) if columns.reference else (f"{_REWARD_MODEL}.{_GROUND_TRUTH}", _GROUND_TRUTH)
        further += [(column, "reference") for column in references]
        further += [(column, "images") for column in IMAGE_COLUMNS if self.reads_images]
        read = {column: role for role, column in self.format.roles.items()}
        read |= {column: role for column, role in further if has_column(kinds, column)}
        heads = {*read, *(column.partition(".")[0] for column in read)}
        unread = [column for column in kinds if column not in heads]
        texts = tuple(column for column in unread if any(kind in _MAY_HOLD_TEXT for kind in kinds[column]))
        others = tuple(column for column in unread if column not in texts)
        nulls = nulls_sentence(sum((rows.nulls for rows in self._opened if rows), Counter[str]()))
        notes = (*self._stored.notes, *([nulls] if nulls else []))
        return Recognition(self.format.name, self.format.why, read, texts, others, notes)

    def check_phase(self, phase: int) -> None:
        """A file must have what its phase needs: responses in phases 1 and 2, a prompt in 2 and 3, and each column that
        a flag names for the phase.

        A file without rejected responses passes in phase 2 (its rows are dropped and counted, other datasets may have
        pairs), unless a flag names their column.
        """
        kinds, where = self._opened[0].kinds, self._address
        label = () if self._columns.label in (None, "none") else ("label",)
        for role in {1: ("chosen", *label), 2: ("chosen", "rejected", "margin"), 3: ("reference",)}[phase]:
            column = getattr(self._columns, role)
            if column is not None and not has_column(kinds, column):
                raise ThreestepError(missing_column(kinds, where, column, role))
        if self.format.name == "text" and phase != 1:
            ways = " or ".join(["as --sft_only_data_path", *advice("plain_text")])
            raise ThreestepError(f"{where}: step {phase} needs prompts, but this is plain text; pass it {ways}")
        if not self.format.has_responses and phase != 3:
            raise ThreestepError(
                f"{where}: step {phase} needs responses, but the columns are {column_names(kinds)} (read as "
                f"{self.format.name}); name the response column with --chosen_column"
            )

    @cached_property
    def _media_columns(self) -> list[str]:
        return media_columns({**self._opened[0].kinds, **(self._opened[1].kinds if self._opened[1] else {})})

    def _record(self, sample: Mapping[str, Any]) -> Record:
        """A row's content, read once for all getters that are called on it in turn."""
        if self._last is None or self._last[0] is not sample:
            check_media(
                sample, self._media_columns, _where(sample), images=self.reads_images, unread=self.unread_images
            )
            record = self.format.read(sample, self.format.roles, _where(sample))
            if not self.reads_images:
                chosen = [*(record.prompt_messages or ()), *(record.chosen_messages or ())]
                for messages in (chosen, record.rejected_messages or ()):
                    check_text_parts(messages, _where(sample), self.unread_images)
            self._last = (sample, record)
        return self._last[1]

    def get_prompt(self, sample: Mapping[str, Any]) -> str | None:
        record = self._record(sample)
        if not record.prompt_messages:
            return record.prompt
        return prompt_text(record.prompt_messages, self.get_tools(sample), _where(sample))

    def get_chosen(self, sample: Mapping[str, Any]) -> str | None:
        messages = self.get_chosen_messages(sample)
        return self._record(sample).chosen if messages is None else response_text(messages, _where(sample))

    def get_rejected(self, sample: Mapping[str, Any]) -> str | None:
        messages = self.get_rejected_messages(sample)
        return self._record(sample).rejected if messages is None else response_text(messages, _where(sample))

    def get_responses(self, sample: Mapping[str, Any]) -> list[str] | None:
        return self._record(sample).responses

    def get_margin(self, sample: Mapping[str, Any]) -> Any:
        return None if self._columns.margin is None else value_of(sample, self._columns.margin)

    def get_mark(self, sample: Mapping[str, Any]) -> bool | None:
        label = self.format.roles.get("label")
        return None if label is None else read_mark(sample, label, _where(sample))

    @property
    def images_folder(self) -> str | None:
        return self._stored.folder

    def get_images(self, sample: Mapping[str, Any]) -> list[Any] | None:
        """The values in a column `images` or `image`."""
        self._record(sample)  # which refuses them where the model reads text alone
        return image_values(sample, _where(sample)) if self.reads_images else None

    # As messages.

    def get_prompt_messages(self, sample: Mapping[str, Any]) -> list[Message] | None:
        return self._record(sample).prompt_messages

    def get_chosen_messages(self, sample: Mapping[str, Any]) -> list[Message] | None:
        return self._record(sample).chosen_messages

    def get_rejected_messages(self, sample: Mapping[str, Any]) -> list[Message] | None:
        return self._record(sample).rejected_messages

    def may_end_unanswered(self) -> bool:
        return len(self.get_train_data()) > 0 and "messages" in self.format.roles

    def get_tools(self, sample: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        return read_tools(value_of(sample, self._columns.tools or "tools"), _where(sample))

    def get_chat_template_kwargs(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """The columns `chat_template_kwargs` (an object) and `enable_thinking` (a truth value)."""
        given = from_json(sample.get(_TEMPLATE_KWARGS), f"{_where(sample)}, column '{_TEMPLATE_KWARGS}'", "an object")
        if given is not None and not isinstance(given, dict):
            raise ThreestepError(
                f"{_where(sample)}: column '{_TEMPLATE_KWARGS}': expected an object, got {kind_of(given)}"
            )
        if isinstance(sample.get(_THINKING), bool):
            given = {_THINKING: sample[_THINKING], **(given or {})}
        return given

    # What a row carries to step 3.

    def get_reference(self, sample: Mapping[str, Any]) -> Any:
        return _json_value(value_of(sample, self._columns.reference or f"{_REWARD_MODEL}.{_GROUND_TRUTH}"))

    def get_extra(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """All columns but the prompt and responses, without nulls and bytes; also the values in `extra_info`."""
        read = {*self.format.roles.values(), self._columns.tools or "tools", self._columns.reference}
        read |= {self._columns.margin, _TEMPLATE_KWARGS, _THINKING, *IMAGE_COLUMNS}
        extra = {name: value for name, value in sample.items() if name not in read}
        if self._columns.reference is None and isinstance(extra.get(_REWARD_MODEL), dict):
            rest = {name: value for name, value in extra.pop(_REWARD_MODEL).items() if name != _GROUND_TRUTH}
            extra |= {_REWARD_MODEL: rest} if rest else {}
        info = extra.get(_EXTRA_INFO)
        lifted = {name: info[name] for name in _IN_EXTRA_INFO if name in info} if isinstance(info, dict) else {}
        return _json_value({**lifted, **extra}) or None


def _where(sample: Mapping[str, Any]) -> str:
    return getattr(sample, "where", "a row")


def _json_value(value: Any) -> Any:
    """The value as JSON holds it: dates and decimals as text, without bytes (mostly pictures) and nulls."""
    if isinstance(value, dict):
        read = {str(key): _json_value(inner) for key, inner in value.items()}
        return {key: inner for key, inner in read.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    if isinstance(value, (bytes, bytearray)):
        return None
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


# The raw dataset of any entry.


def create_raw_dataset(name: str, source: SourceArguments, cache_dir: str, seed: int) -> PromptRawDataset:
    """Load the dataset modules, then create the raw dataset of one `--data_path` entry."""
    for module in source.dataset_module:
        load_dataset_module(module)
    dataset = find_dataset(name)
    if isinstance(dataset, str):
        return FileDataset(name, columns_of(source), source.data_format, cache_dir)
    place = f"{where(dataset)}, line {getattr(getattr(dataset.__init__, '__code__', None), 'co_firstlineno', '?')}"
    check_signature(dataset, f"--data_path {name}", place, ("output_path", "seed", "local_rank", "dataset_name"))
    return call_user(dataset, cache_dir, seed, 0, name)


def columns_of(source: SourceArguments) -> FileColumns:
    """The columns that the flags name: --prompt_column and so on."""
    return FileColumns(**{field.name: getattr(source, f"{field.name}_column") for field in fields(FileColumns)})


_OF_ONE_KIND = ("margin", "reference")  # roles of columns that only one kind of rows reads; all read the others


def columns_for(alone: Sequence[str], source: SourceArguments) -> dict[str, str | None]:
    """The columns that the flags name and a kind of rows reads, by role: its build depends on them. alone: those of one
    kind that it reads."""
    named = asdict(columns_of(source))
    return {role: column for role, column in named.items() if role in alone or role not in _OF_ONE_KIND}


def look_at_data(phase: int, source: SourceArguments) -> None:
    """ThreestepError for local files that cannot serve a phase, and for a dataset on the hub that is out of reach."""
    names = [*source.data_path, *(source.sft_only_data_path if phase == 1 else [])]
    for name in names:
        dataset = find_dataset(name)
        if not isinstance(dataset, str):
            if dataset.is_on_hub and not os.path.exists(name):
                check_hub(f"--data_path: '{name}'", "datasets", name)
        elif dataset in STORES:
            check_stored(dataset, name.partition(":")[2], "data_path", reach=True)
        elif _is_small(name):
            try:
                FileDataset(name, columns_of(source), source.data_format, None).check_phase(phase)
            except ThreestepError as refusal:
                raise ThreestepError(f"{refusal}; {POINTER}") from refusal


def _is_small(name: str) -> bool:
    """True for local files that are few bytes together."""
    reader, address = split_reader(name) or ("", "")
    if is_remote(address):
        return False
    files = files_of(reader, address, "data_path")
    return sum(os.path.getsize(file) for file in files) <= _MOST_BYTES
