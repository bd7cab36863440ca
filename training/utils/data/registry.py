"""Names of datasets and the classes behind them. Knows nothing of what the classes do.

A `--data_path` entry is one of
- a registered name (`embedded`, `gsm8k` after its module was loaded, a hub name that ships with the package);
- a path that ends in a registered name (`/data/Dahoas/rm-static`): the class gets the whole path as its name;
- `jsonl:PATH`, `json:PATH`, `csv:PATH`, `parquet:PATH` or `arrow:PATH`: files, no class needed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from training.utils.data.addresses import check_address
from training.utils.data.file_dataset import FileDataset, columns_of
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.readers import READERS, split_reader
from training.utils.run.errors import ThreestepError, nearest_names
from training.utils.run.user_files import load_module

if TYPE_CHECKING:
    from training.utils.data.arguments import DataArguments

_BUILT_IN_MODULES = ("training.utils.data.embedded",)
_BUILT_IN_PACKAGE = "training.utils.data.hub"  # every module in it registers its classes

_classes: dict[str, type[PromptRawDataset]] = {}

DatasetClass = TypeVar("DatasetClass", bound=type[PromptRawDataset])


def register_dataset(*names: str) -> Callable[[DatasetClass], DatasetClass]:
    """Class decorator: make a PromptRawDataset subclass known under one name or several.

    Raises ThreestepError where another class already has the name. The same class from the same file may come
    twice (its module was imported under two names); the later one stands.
    """

    def register(dataset_class: DatasetClass) -> DatasetClass:
        for name in names:
            known = _classes.get(name)
            if known is not None and _where(known) != _where(dataset_class):
                raise ThreestepError(
                    f"two dataset classes are registered as '{name}': {_where(known)} and "
                    f"{_where(dataset_class)}; "
                    "give one of them another name"
                )
            _classes[name] = dataset_class
        return dataset_class

    return register


def _where(dataset_class: type) -> str:
    try:
        source = os.path.realpath(inspect.getfile(dataset_class))
    except (TypeError, OSError):
        source = dataset_class.__module__
    return f"{dataset_class.__qualname__} in {source}"


def registered_names() -> list[str]:
    """Every name known now, the built-in ones among them."""
    package = importlib.import_module(_BUILT_IN_PACKAGE)
    in_package = [f"{_BUILT_IN_PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in [*_BUILT_IN_MODULES, *in_package]:
        importlib.import_module(name)
    return sorted(_classes)


def load_dataset_module(path: str) -> ModuleType:
    """Run a Python file that registers datasets; a file already loaded is not run again."""
    return load_module(path, "dataset_module")


def find_dataset(name: str) -> type[PromptRawDataset] | str:
    """Return the class registered for a `--data_path` entry, or the reader's name for `jsonl:` and its like.

    Raises ThreestepError where nothing goes by that name (with the nearest names) or the file does not exist.
    """
    files = split_reader(name)
    if files is not None:
        check_address(files[1], "data_path")
        return files[0]
    names = registered_names()
    if name in _classes:
        return _classes[name]
    trimmed = name.rstrip("/")
    endings = [known for known in names if trimmed.endswith("/" + known)]
    if endings:
        if not os.path.exists(name):
            raise ThreestepError(
                f"data_path: '{name}' is a path that ends in the registered name "
                f"'{max(endings, key=len)}', but "
                "nothing is there; correct the path, or write the registered name alone"
            )
        return _classes[max(endings, key=len)]
    near = nearest_names(name, names) or f"; known are {', '.join(names)}"
    raise ThreestepError(
        f"data_path: no dataset is registered as '{name}'{near.rstrip('?')}; register a class for it with "
        "@register_dataset in a file given as --dataset_module, or read files as "
        f"{', '.join(f'{reader}:PATH' for reader in READERS)}"
    )


def create_raw_dataset(name: str, data: DataArguments, seed: int, local_rank: int = 0) -> PromptRawDataset:
    """Build the raw dataset behind one `--data_path` entry.

    Dataset modules are loaded first. `dataset_dir` is set on the instance before its constructor runs,
    which keeps DeepSpeed-Chat's four-argument constructor as it is and leaves the class itself alone.
    """
    for module in data.dataset_module:
        load_dataset_module(module)
    found = find_dataset(name)
    if isinstance(found, str):
        return FileDataset(name, columns_of(data), data.data_format, data.cache_dir)
    raw_dataset = found.__new__(found)
    raw_dataset.dataset_dir = os.path.expanduser(data.dataset_dir) if data.dataset_dir else None
    raw_dataset.__init__(data.cache_dir, seed, local_rank, name)  # type: ignore[misc]
    return raw_dataset
