"""The weights in a model folder: safetensors by their headers, forms in which they are not stored whole, and adapters.

Imports no library and reads no weight: a header is the size of a file's tensors, not of their values.
Format: https://github.com/huggingface/safetensors#format

Plugins read other forms, by the field of a configuration that names one (`stored_forms` of `Plugin.tables`), and
adapters (`AdapterEntry`). Without the plugin such a folder is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json
from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added, missing, missing_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings
    from training.utils.plugins.plugin import AdapterEntry


ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000  # safetensors' limit
_GIT_LFS = b"version https://git-lfs"
# Bytes of one value, by safetensors' names; others are not checked.
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

_WHOLE = {"F16", "BF16", "F32", "F64"}  # of weights that stand for themselves


@dataclass(frozen=True)
class StoredTensor:
    """dtype: safetensors' name of it, such as BF16. file: where it is."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def is_whole(self) -> bool:
        """True if its values are numbers as a model computes with them; otherwise integers, or floats of few bits,
        which need scales."""
        return self.dtype in _WHOLE


def weight_files(folder: Path, explicit: str | None = None) -> list[Path]:
    """Return the safetensors that transformers reads in `folder`; [] if there are none.

    explicit: `transformers_weights` of the configuration, a file's name

    Raises ThreestepError if an index is damaged or names files that are not there.
    """
    for name in (explicit,) if explicit else (ONE_FILE, INDEX):
        path = folder / name
        if path.is_file():
            return _shards(path) if name.endswith(".index.json") else [path]
    return []


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name. ThreestepError if it is cut off or damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if (first + file.read(len(_GIT_LFS) - 8)).startswith(_GIT_LFS):
            raise ThreestepError(f"'{path}': expected weights, got a Git LFS pointer; run `git lfs pull` in the folder")
        length = int.from_bytes(first, "little")
        if size < 8 or (8 + length > size and length <= _LONGEST_HEADER_BYTES):
            raise _cut_off(path, 8 + length if len(first) == 8 else 8, size)
        if length > _LONGEST_HEADER_BYTES:
            raise _damaged(path, f"its header claims a length of {length:,} bytes")
        file.seek(8)
        text = file.read(length)
    try:
        header = parse_json(text)
        tensors = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
        notes = dict(header.get("__metadata__") or {})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, "its header is not a table of tensors") from None
    if not all(isinstance(note, str) for note in notes.values()):
        raise _damaged(path, "the __metadata__ in its header has values that are not strings")
    _check_places(path, tensors, size - 8 - length)
    return {name: StoredTensor(dtype, shape, path) for name, (dtype, shape, *_) in tensors.items()}


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = map(int, entry["data_offsets"])
    if not isinstance(entry["dtype"], str):
        raise TypeError(entry["dtype"])
    return entry["dtype"], tuple(int(side) for side in entry["shape"]), begin, end


def _check_places(path: Path, tensors: dict[str, Any], data_bytes: int) -> None:
    """Check that every tensor begins where the one before it ends, and that the last ends with the file."""
    at = 0
    for name, (dtype, shape, begin, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        wanted = _BYTES[dtype] * prod(shape) if dtype in _BYTES else end - begin
        if begin != at or end - begin != wanted:
            raise _damaged(path, f"its header places {name} ({dtype} {list(shape)}) at bytes {begin:,} to {end:,}")
        at = end
    if at > data_bytes:
        raise _cut_off(path, path.stat().st_size - data_bytes + at, path.stat().st_size)
    if at < data_bytes:
        raise _damaged(path, f"{data_bytes - at:,} bytes follow its last tensor")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(index, "it has no weight_map from tensors to files") from None
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ThreestepError(
            f"'{index}' names {len(paths)} weight files, but {len(absent)} of them are missing, such as {absent[0]}; "
            "download or copy the folder again"
        )
    return paths


def _cut_off(path: Path, wanted: int, size: int) -> ThreestepError:
    return ThreestepError(
        f"'{path}': expected at least {wanted:,} bytes according to its header, got {size:,}: the file is truncated; "
        "download or copy it again"
    )


def _damaged(path: Path, why: str) -> ThreestepError:
    return ThreestepError(f"'{path}' is damaged: {why}; download or copy it again")


class StoredForm:
    """A form of stored weights. config: a model's, or one that `check` has seen, which has the field in itself or in
    its part for text."""

    def check_entry(self, entry: Any, file: Path) -> None:
        """ThreestepError for a field of a config.json that is no such thing; before any library is imported."""

    def check(self, config: Any, where: str) -> None:
        """ThreestepError unless the weights can be read; otherwise prepare the configuration for it, in place.

        where: the model's folder or hub name
        """

    def check_trains(self, config: Any, where: str) -> None:
        """ThreestepError if the weights cannot be trained as they are read."""

    def is_read_whole(self, config: Any) -> bool:
        """True if the weights are whole ones once the model is loaded."""
        raise NotImplementedError

    def forget(self, config: Any) -> None:
        """Remove what says so from the configuration of a model that was loaded, if its weights are whole now."""


class WholeWeights(StoredForm):
    """The form of a model whose configuration names none."""

    def is_read_whole(self, config: Any) -> bool:
        """Always."""
        return True


def stored_form(config: Any) -> StoredForm:
    """Return the form in which a model's files hold its weights."""
    places = (place for field, place in added("stored_forms", ()).items() if _has(config, field))
    form: type[StoredForm] = next(map(named_object, places), WholeWeights)
    return form()


def check_entries(config: Mapping[str, Any], file: Path) -> None:
    """ThreestepError for fields of a config.json that name a form of stored weights and are mistaken."""
    for field, place in added("stored_forms", ()).items():
        if config.get(field) is not None:
            named_object(place)().check_entry(config[field], file)


def check_form(config: Any, where: str) -> None:
    """ThreestepError unless the weights can be read as they are stored (`StoredForm.check`)."""
    for field in missing("stored_forms"):
        if _has(config, field):
            raise ThreestepError(
                f"'{where}' has {field} in its config.json, so its weights are stored in a special form; "
                f"{missing_plugin('stored_forms', field)}"
            )
    stored_form(config).check(config, where)


def _has(config: Any, field: str) -> bool:
    return any(getattr(part, field, None) is not None for part in (config, config.get_text_config()))


_TABLE = "adapters"


class AdapterPlan(Protocol):
    """Adapters that fit their base. supplied: names of the base's tensors that they bring."""

    @property
    def supplied(self) -> Collection[str]: ...

    def put_on(self, model: PreTrainedModel, settings: ModelSettings) -> None:
        """Merge them into `model`, or have it train them on. A collective under ZeRO-3."""


class GivenAdapter(Protocol):
    """Adapters that are given as a model.

    name: as they were given. base: the folder or hub name of the model that they adapt. base_in_words: that, for errors
    settings_file: it names the base. weights: a safetensors file
    """

    @property
    def name(self) -> str: ...
    @property
    def base(self) -> str: ...
    @property
    def base_in_words(self) -> str: ...
    @property
    def settings_file(self) -> Path: ...
    @property
    def weights(self) -> Path: ...

    def planned(self, make_empty: Callable[[], PreTrainedModel], settings: ModelSettings) -> AdapterPlan:
        """Compare them with their base, before a weight is read. make_empty: returns the base on the meta device.
        ThreestepError if they do not fit."""


def find_adapter(name_or_path: str) -> GivenAdapter | None:
    """Return the adapters in a folder or under a hub name; None if it is a model. ThreestepError if they cannot be
    read."""
    for file in missing(_TABLE):
        if Path(name_or_path, file).is_file() and not Path(name_or_path, "weights.json").is_file():
            raise ThreestepError(f"'{name_or_path}' holds {file} but no model; {missing_plugin(_TABLE, file)}")
    entries: dict[str, AdapterEntry] = added(_TABLE, ())
    found = (named_object(entry.find)(name_or_path) for entry in entries.values())
    return next((adapter for adapter in found if adapter is not None), None)


def model_of(name_or_path: str) -> str:
    """Return the base of an adapter, or the name or path of a model."""
    adapter = find_adapter(name_or_path)
    return name_or_path if adapter is None else adapter.base
