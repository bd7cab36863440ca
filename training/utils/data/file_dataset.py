"""Files as raw datasets, no class needed: `jsonl:PATH`, `json:`, `csv:`, `parquet:` and `arrow:`.

Joins a reader (`readers`) and a format (`formats`). Texts are taken as stored, so a response that should begin with
a space is stored with it; messages are also given as DeepSpeed-Chat's text (`message_forms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from training.utils.data.addresses import content_of_files, share_files
from training.utils.data.formats import Columns, Format, Record, has_column, missing_column, recognise, value_of
from training.utils.data.message_forms import Message, from_json, prompt_text, read_tools, response_text
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.readers import Row, Rows, column_names, files_of, kind_of, open_rows, split_reader
from training.utils.run.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.data.arguments import DataArguments

_REWARD_MODEL, _GROUND_TRUTH = "reward_model", "ground_truth"  # verl's column, and the reference in it
_EXTRA_INFO, _IN_EXTRA_INFO = "extra_info", ("index", "tools_kwargs", "interaction_kwargs")  # verl's, too
_TEMPLATE_KWARGS, _THINKING = "chat_template_kwargs", "enable_thinking"


def columns_of(data: DataArguments) -> Columns:
    """The columns that the flags name: --prompt_column and so on."""
    return Columns(**{field.name: getattr(data, f"{field.name}_column") for field in fields(Columns)})


# Columns that one phase alone reads; the others concern every phase.
_PHASE_OF_COLUMN = {"margin": 2, "reference": 3}


def columns_for(phase: int, data: DataArguments) -> dict[str, str | None]:
    """The columns that the flags name and a phase reads, by role: what its build depends on."""
    named = asdict(columns_of(data))
    return {role: column for role, column in named.items() if _PHASE_OF_COLUMN.get(role, phase) == phase}


class FileDataset(PromptRawDataset):
    """The files behind one `--data_path` entry; found now, opened when rows are asked for."""

    def __init__(self, name: str, columns: Columns, data_format: str | None, output_path: str) -> None:
        self.dataset_name = name
        self.dataset_clean_name = name.replace("/", "_").replace(":", "_")
        self.output_path = output_path
        reader = split_reader(name)
        assert reader is not None, f"{name} names no reader"
        self._reader, self._address = reader
        self._columns = columns
        self._asked_format = data_format
        self._files = share_files(files_of(self._reader, self._address, "data_path"))
        self._rows: tuple[Rows, Rows | None] | None = None
        self._format: Format | None = None
        self._last: tuple[Any, Record] | None = None

    # The rows.

    def get_train_data(self) -> Sequence[Row]:
        return self._opened()[0]

    def get_eval_data(self) -> Sequence[Row] | None:
        """Of a folder: the files whose names begin with test, validation or eval, where others begin with train."""
        return self._opened()[1]

    def _opened(self) -> tuple[Rows, Rows | None]:
        if self._rows is None:
            train, held_out = self._files
            self._rows = (
                open_rows(self._reader, train, self.output_path),
                open_rows(self._reader, held_out, self.output_path) if held_out else None,
            )
        return self._rows

    def get_fingerprint(self) -> str:
        train, held_out = self._files
        return f"{content_of_files(train, self.output_path)} {content_of_files(held_out, self.output_path)}"

    # What they say.

    @property
    def format(self) -> Format:
        """The format of the files, recognised from their columns or named by flags."""
        if self._format is None:
            train, held_out = self._opened()
            self._format = recognise(train.kinds, self._columns, self._asked_format, self._address)
            if held_out is not None and len(held_out):
                recognise(held_out.kinds, self._columns, self._format.name, self._address)
        return self._format

    def check_phase(self, phase: int) -> None:
        """A file must have what its phase needs: responses in phases 1 and 2, a prompt in 2 and 3, and each column
        that a flag names for it.

        A file without a rejected response is let pass in phase 2 (its rows are dropped and counted, other datasets
        may have pairs), unless a flag names its column.
        """
        kinds, where = self._opened()[0].kinds, self._address
        needed = {1: ("chosen",), 2: ("chosen", "rejected", "margin"), 3: ("reference",)}[phase]
        for role in needed:
            column = getattr(self._columns, role)
            if column is not None and not has_column(kinds, column):
                raise ThreestepError(missing_column(kinds, where, column, role))
        if self.format.name == "text" and phase != 1:
            raise ThreestepError(
                f"{where}: phase {phase} needs prompts and this is plain text; give it as --sft_only_data_path, or as "
                "--unsupervised_dataset_name"
            )
        if not self.format.has_responses and phase != 3:
            raise ThreestepError(
                f"{where}: phase {phase} needs responses and the columns are {column_names(kinds)} (read as "
                f"{self.format.name}); name the column of the responses with --chosen_column"
            )

    def _record(self, sample: Mapping[str, Any]) -> Record:
        """What a row says, read once for all getters that ask for it in turn."""
        last = self._last
        if last is None or last[0] is not sample:
            last = (sample, self.format.read(sample, self.format.roles, _where(sample)))
            self._last = last
        return last[1]

    def get_prompt(self, sample: Mapping[str, Any]) -> str | None:
        record = self._record(sample)
        if not record.prompt_messages:
            return record.prompt
        return prompt_text(record.prompt_messages, self.get_tools(sample), _where(sample))

    def get_chosen(self, sample: Mapping[str, Any]) -> str | None:
        record = self._record(sample)
        return _text(record.chosen, record.chosen_messages, sample)

    def get_rejected(self, sample: Mapping[str, Any]) -> str | None:
        record = self._record(sample)
        return _text(record.rejected, record.rejected_messages, sample)

    def get_responses(self, sample: Mapping[str, Any]) -> list[str] | None:
        return self._record(sample).responses

    def get_margin(self, sample: Mapping[str, Any]) -> Any:
        return None if self._columns.margin is None else value_of(sample, self._columns.margin)

    # As messages.

    def get_prompt_messages(self, sample: Mapping[str, Any]) -> list[Message] | None:
        return self._record(sample).prompt_messages

    def get_chosen_messages(self, sample: Mapping[str, Any]) -> list[Message] | None:
        return self._record(sample).chosen_messages

    def get_rejected_messages(self, sample: Mapping[str, Any]) -> list[Message] | None:
        return self._record(sample).rejected_messages

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
        """Every column that says something else than the prompt and its responses, without nulls and bytes; of verl's
        `extra_info` also what rewards ask for by name."""
        read = {*self.format.roles.values(), self._columns.tools or "tools", self._columns.reference}
        read |= {self._columns.margin, _TEMPLATE_KWARGS, _THINKING}
        extra = {name: value for name, value in sample.items() if name not in read}
        if self._columns.reference is None and isinstance(extra.get(_REWARD_MODEL), dict):
            rest = {name: value for name, value in extra.pop(_REWARD_MODEL).items() if name != _GROUND_TRUTH}
            extra |= {_REWARD_MODEL: rest} if rest else {}
        info = extra.get(_EXTRA_INFO)
        lifted = {name: info[name] for name in _IN_EXTRA_INFO if name in info} if isinstance(info, dict) else {}
        return _json_value({**lifted, **extra}) or None


def _where(sample: Mapping[str, Any]) -> str:
    return getattr(sample, "where", "a row")


def _text(text: str | None, messages: list[Message] | None, sample: Mapping[str, Any]) -> str | None:
    return text if messages is None else response_text(messages, _where(sample))


def _json_value(value: Any) -> Any:
    """The same as JSON holds it: dates and decimals as text, bytes (pictures, mostly) and nulls left out."""
    if isinstance(value, dict):
        read = {str(key): _json_value(inner) for key, inner in value.items()}
        return {key: inner for key, inner in read.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    if isinstance(value, (bytes, bytearray)):
        return None
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
