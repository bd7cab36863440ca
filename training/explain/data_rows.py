"""Rows of a run's data by their places: the file and line of each, or its dataset and number."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.data.sources.arguments import SourceArguments
from training.utils.data.sources.create import create_raw_dataset
from training.utils.data.sources.file_dataset import FileDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def places_of_rows(rows: Iterable[int], settings: Mapping[str, Any], objective: str) -> tuple[dict[int, str], str]:
    """Return where each row stands; and why that is not known, where the data cannot be read again.

    settings: of the run's config.yaml. A row's number counts the rows of all datasets, one after the other, those for
    evaluation with them (training.utils.data.build.portions).
    """
    wanted, found, first = sorted(set(rows)), dict[int, str](), 0
    own = {field.name: settings[field.name] for field in fields(SourceArguments) if field.name in settings}
    names = [*(own.get("data_path") or ()), *((own.get("sft_only_data_path") or ()) if objective == "sft" else ())]
    try:
        cache = str(settings.get("data_output_path") or "")
        sources = [create_raw_dataset(name, SourceArguments(**own), cache, 0) for name in names]
        if not any(isinstance(source, FileDataset) for source in sources):
            return {}, ""  # the row's number says as much, and these may be long in the making
        for name, source in zip(names, sources, strict=True):
            for part in (source.get_train_data(), source.get_eval_data() or ()):
                for row in wanted:
                    if first <= row < first + len(part):
                        found[row] = getattr(part[row - first], "where", f"{name}, row {row - first}")
                first += len(part)
    except (ThreestepError, OSError) as problem:
        return {}, f"which files and lines the rows come from is not known: {problem}"
    return found, ""
