"""What cannot be converted or loaded is told in a sentence. That nothing changes where it can is in
tests/invariants/test_universal.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.other_ranks import universal
from training.utils.base.errors import ThreestepError
from training.utils.engine.checkpoint_files import write_state


def engine(stage: int = 0, optimizer: str = "adamw") -> Any:
    of_run = SimpleNamespace(load_universal_checkpoint=False)
    inner = SimpleNamespace(
        _config=of_run,
        load_universal_checkpoint=lambda: of_run.load_universal_checkpoint,
        _get_ckpt_name=lambda folder, tag, pp_placeholder: f"{folder}/{tag}/{pp_placeholder}.pt",
    )
    settings = SimpleNamespace(zero_stage=stage, optimizer=optimizer)
    return SimpleNamespace(engine=inner, settings=settings, parameter_groups=[["a"]])


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ThreestepError,
        match="cannot convert c for another number of ranks or ZeRO stage into .*/file/c: .*/file/c: Not a directory; "
        "free disk space",
    ):
        universal.convert(Path("c"), tmp_path / "file" / "c", engine())


def test_states_of_another_optimizer_stay_where_they_are(tmp_path):
    with pytest.raises(
        ThreestepError,
        match="--resume: c has the state of --optimizer sign, which goes on with as many ranks and",
    ):
        universal.convert(Path("c"), tmp_path / "c", engine(optimizer="sign"))
    assert not list(tmp_path.iterdir())


def test_files_of_another_form(tmp_path):
    write_state({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(
        ThreestepError,
        match="cannot convert DeepSpeed's files in .* for another number of ranks .*KeyError: 'optimizer'",
    ):
        universal.convert(tmp_path, tmp_path / "c", engine())


def test_an_engine_that_finds_nothing(tmp_path):
    nothing = engine(stage=2)
    with pytest.raises(ThreestepError, match="there is no state of 'model' in .*; resume from another one"):
        universal.load(nothing, tmp_path, "model")
    assert nothing.engine._config.load_universal_checkpoint is False
