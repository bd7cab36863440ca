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


def test_an_engine_that_finds_nothing(tmp_path):
    nothing = engine(stage=2)
    with pytest.raises(ThreestepError, match="has no state for 'model'; resume from another checkpoint"):
        universal.load(nothing, tmp_path, "model")
    assert nothing.engine._config.load_universal_checkpoint is False


def test_what_cannot_be_converted(tmp_path):
    """A place that cannot be written; states of another optimizer, which stay where they are; files of another form."""
    (tmp_path / "file").touch()
    write_state({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    for source, place, optimizer, words in [
        (
            Path("c"),
            tmp_path / "file" / "c",
            "adamw",
            "cannot convert c into .*/file/c for .*: .*/file/c: Not a directory; free disk",
        ),
        (
            Path("c"),
            tmp_path / "c",
            "sign",
            "--resume: c holds the state of --optimizer sign, which can only resume with",
        ),
        (
            tmp_path,
            tmp_path / "c",
            "adamw",
            "cannot convert DeepSpeed's files in .* number of ranks .*KeyError: 'optimiz",
        ),
    ]:
        with pytest.raises(ThreestepError, match=words):
            universal.convert(source, place, engine(optimizer=optimizer))
        assert optimizer == "adamw" or not place.exists()
