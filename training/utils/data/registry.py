"""Names of datasets and their classes. Knows nothing of the classes' content.

A `--data_path` entry is one of
- a registered name (`gsm8k` after its module was loaded, those that plugins add, such as `embedded`), with
  settings behind commas where the class takes some (`name,rows=500`);
- a path that ends in a registered name (`/data/Dahoas/rm-static`): the class gets the whole path as its name;
- `jsonl:PATH`, `json:PATH`, `csv:PATH`, `parquet:PATH` or `arrow:PATH`: files, without a class;
- `pairs.csv`: a file whose ending names its reader;
- a folder that `save_to_disk` wrote;
- `hub:OWNER/NAME`: a dataset on the hub, without a class.
"""

from __future__ import annotations

import glob
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.user_files import load_module, loaded_name, named_object
from training.utils.data.files.readers import READERS, check_stored, is_saved_dataset, split_reader, why_no_dataset
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.plugins.registry import added, owner_of

_ADDED: dict[str, str] = added("data_sources", ())  # addresses of plugins' classes, which register names themselves
_BY_BEGINNING = {name: address for name, address in _ADDED.items() if name.endswith(":")}

_classes: dict[str, type[PromptRawDataset]] = {}

_BASE = "from threestep.training.utils.data.raw_dataset import PromptRawDataset"
_SPLIT = "from threestep.training.utils.data.data_utils import get_raw_dataset_split_index"

DatasetClass = TypeVar("DatasetClass", bound=type[PromptRawDataset])


def register_dataset(*names: str) -> Callable[[DatasetClass], DatasetClass]:
    """Class decorator: register a PromptRawDataset subclass under one or more names.

    Raises ThreestepError for any other class, and where another one has the name. The same class from the same file may
    be registered twice (its module was imported under two names); the later one wins.
    """

    def register(dataset_class: DatasetClass) -> DatasetClass:
        if not issubclass(dataset_class, PromptRawDataset):
            raise ThreestepError(
                f"@register_dataset expects a subclass of Threestep's PromptRawDataset, got {where(dataset_class)}; "
                f"delete a PromptRawDataset of that file's own, and import `{_BASE}`"
            )
        for name in names:
            known = _classes.get(name)
            if known is not None and where(known) != where(dataset_class):
                raise ThreestepError(
                    f"two dataset classes are registered as '{name}': {where(known)} and {where(dataset_class)}; "
                    "rename one of them"
                )
            _classes[name] = dataset_class
        return dataset_class

    return register


def where(dataset_class: type) -> str:
    """The class's name and its file."""
    try:
        source = os.path.realpath(inspect.getfile(dataset_class))
    except (TypeError, OSError):
        source = dataset_class.__module__
    return f"{dataset_class.__qualname__} in {source}"


def registered_names() -> list[str]:
    """All registered names, including those of plugins."""
    for name in _ADDED.keys() - _BY_BEGINNING.keys():
        named_object(_ADDED[name])
    return sorted(_classes)


def load_dataset_module(path: str) -> ModuleType:
    """Run a Python file that registers datasets, once. Its relative imports are those of training/utils/data."""
    try:
        module = load_module(path, "--dataset_module", package=loaded_name("training.utils.data"))
    except ThreestepError as refusal:
        if "No module named 'dschat" not in str(refusal):
            raise
        raise ThreestepError(f"{refusal}; import `{_BASE}` and `{_SPLIT}` instead") from refusal
    defined = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    own = [each for each in defined if hasattr(each, "get_train_data") or hasattr(each, "get_chosen")]
    own.sort(key=lambda each: each.__name__ == PromptRawDataset.__name__)
    if own and not set(map(where, own)) & set(map(where, _classes.values())):
        raise ThreestepError(
            f"--dataset_module: '{path}' registers no dataset; add above class {own[0].__name__}: `from threestep."
            'training.utils.data.registry import register_dataset` and `@register_dataset("mine")` (--data_path mine)'
        )
    return module


def find_dataset(name: str) -> type[PromptRawDataset] | str:
    """Return the class registered for a `--data_path` entry, or the reader's name for `jsonl:` and the like.

    Raises ThreestepError where the name is unknown (with suggestions) or the file does not exist.
    """
    beginning = next((beginning for beginning in _BY_BEGINNING if name.startswith(beginning)), None)
    if beginning is not None:
        return named_object(_BY_BEGINNING[beginning])  # type: ignore[no-any-return]
    files = split_reader(name)
    if files is not None and name not in _classes and not is_saved_dataset(name):
        check_stored(*files, "data_path")
        return files[0]
    names = registered_names()
    if name in _classes:
        return _classes[name]
    bare = name.partition(",")[0]
    if bare in _classes and _classes[bare].takes_settings:
        return _classes[bare]
    endings = [known for known in names if name.rstrip("/").endswith("/" + known)]
    if endings:
        ending = max(endings, key=len)
        if not os.path.exists(name):
            raise ThreestepError(
                f"--data_path: '{name}' ends in the registered name '{ending}', but does not exist; "
                + (_classes[ending].dataset_dir_remedy or "correct the path, or use the name alone")
            )
        return _classes[ending]
    if files is not None:
        return files[0]
    if why := why_no_dataset(name):
        raise ThreestepError(f"--data_path: {why}")
    plugin = owner_of("data_sources", bare) or owner_of("data_sources", name, by_beginning=":" in name)
    if plugin := plugin or owner_of("row_stores", name.partition(":")[0]):
        raise ThreestepError(f"--data_path: '{name}' belongs to the plugin '{plugin}', which is not installed")
    beside = glob.glob(os.path.join(glob.escape(os.path.dirname(name)), "*"))
    near = nearest_names(name, [*names, *beside]).rstrip("?")
    raise ThreestepError(
        f"--data_path: there is no file or dataset '{name}'{near}; pass a file as "
        f"{', '.join(f'{one}:PATH' for one in READERS)}, a hub dataset as hub:OWNER/NAME, or the name of your own "
        "class with --dataset_module FILE.py"
    )
