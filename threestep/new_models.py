"""`threestep new-model` as a Python function: random weights, and a tokenizer trained on the rows' texts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from threestep.inputs import address_of_rows
from threestep.mistakes import mistakes_in_python
from threestep.process_state import silent_bars
from threestep.running import flags_of, run_here
from training.utils.plugins.registry import check_plugin

_PROGRAM = "threestep.plugins.programs.new_model"


@mistakes_in_python
def new_model(rows: Any, folder: str | os.PathLike[str], **settings: Any) -> Path:
    """Make a small model with random weights and a tokenizer trained on the texts of `rows`; return `folder`. Needs the
    plugin that provides `threestep new-model`.

    rows: as in `sft`, in memory or a path
    folder: where to write the model; replaces a model that is already there
    settings: flags of `threestep new-model --help all`, e.g. vocab_size=300, hidden_size=64, num_hidden_layers=2
    """
    check_plugin("programs", "threestep.new_model")
    place = Path(folder).expanduser().absolute()
    with tempfile.TemporaryDirectory() as given:
        with silent_bars():
            data = address_of_rows(rows, Path(given))
        run_here(_PROGRAM, flags_of({"data_path": data, **settings, "out": str(place)}), {}, place)
    return place
