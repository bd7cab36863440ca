"""The places of a run's rows in its data: file and line.

A run's config.yaml may name any code, address or dataset. By itself only plain files of this machine are read again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_value
from training.utils.data.arguments import SourceArguments
from training.utils.data.file_dataset import FileDataset, create_raw_dataset
from training.utils.data.files.readers import READERS, files_of, split_reader

if TYPE_CHECKING:
    from threestep.plugins.audit.quantities.step import AuditedStep

_UNKNOWN = "the files and lines that the rows come from are not known"


def places_of_step(
    steps: Iterable[AuditedStep], settings: Mapping[str, Any], *, trusts_run: bool = False
) -> tuple[dict[int, str], str]:
    """As `places_of_rows`, of the rows of steps of one objective."""
    steps = [*steps]
    rows = {int(row) for step in steps if step.has("rows") for row in step.tensor("rows")}
    return places_of_rows(rows, settings, steps[-1].head.objective, trusts_run=trusts_run) if rows else ({}, "")


def places_of_rows(
    rows: Iterable[int], settings: Mapping[str, Any], objective: str, *, trusts_run: bool = False
) -> tuple[dict[int, str], str]:
    """Return where each row stands; and why that is not known, where the data cannot be read again.

    settings: of the run's config.yaml. trusts_run: its dataset modules are run, and its addresses opened. A row's
    number counts the rows of all datasets, one after the other, those for evaluation with them
    (training.utils.data.build.portions).
    """
    wanted, found, first = sorted(set(rows)), dict[int, str](), 0
    try:
        own = _source_of(settings)
        names = [*own.data_path, *(own.sft_only_data_path if objective == "sft" else ())]
        if not any(map(split_reader, names)):
            return {}, ""  # the row's number says as much, and these may be long in the making
        if not trusts_run:
            _check_plain(own.dataset_module, names)
        given = str(settings.get("data_output_path") or "") if trusts_run else ""
        with tempfile.TemporaryDirectory() as spool:  # tables of CSV are written to a file while they are read
            sources = [create_raw_dataset(name, own, given or spool, 0) for name in names]
            if not any(isinstance(source, FileDataset) for source in sources):
                return {}, ""
            for name, source in zip(names, sources, strict=True):
                for part in (source.get_train_data(), source.get_eval_data() or ()):
                    for row in wanted:
                        if first <= row < first + len(part):
                            found[row] = getattr(part[row - first], "where", f"{name}, row {row - first}")
                    first += len(part)
    except (ThreestepError, OSError) as problem:
        return {}, f"{_UNKNOWN}: {problem}"
    return found, ""


def _source_of(settings: Mapping[str, Any]) -> SourceArguments:
    kinds = {name: kind for name, kind in get_type_hints(SourceArguments).items() if name in settings}
    return SourceArguments(
        **{name: checked_value(kind, settings[name], f"config.yaml, {name}") for name, kind in kinds.items()}
    )


def _check_plain(modules: Iterable[str], names: Iterable[str]) -> None:
    """ThreestepError for what is more than plain files of this machine."""
    remedy = "add --trust_run if you trust the run"
    for module in modules:
        raise ThreestepError(f"the run's config.yaml would run the Python file '{module}' (dataset_module); {remedy}")
    for name in names:
        reader, address = split_reader(name) or ("", name)
        if reader not in READERS or "://" in address:
            raise ThreestepError(f"the run's data '{name}' is not a file on this machine; {remedy}")
        for file in files_of(reader, address, "data_path"):
            if not os.path.isfile(file):
                raise ThreestepError(f"the run's data '{file}' is not a regular file")
