"""The steps as Python functions: several calls in one process, the command line's weights, and what a call leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.calls_program import PAIRS, ROWS, SETTINGS
from tests.end_to_end.conftest import run_step, save_start
from tests.support.forked_programs import ON_CPU, run_python

PROGRAM = Path(__file__).with_name("calls_program.py")


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    return _called(tmp_path_factory.mktemp("calls"), 3)


def _called(place, calls):
    save_start(place / "start")
    ran = run_python([str(PROGRAM), str(place), str(calls)], {**os.environ, **ON_CPU}, timeout_seconds=120 + 20 * calls)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return place, json.loads((place / "told.json").read_text())


def test_a_second_call_holds_no_more_than_the_first(called):
    counts = called[1]["counts"]
    assert [count["group"] for count in counts] == [False] * 3
    assert [count["variables"] for count in counts] == [[]] * 3
    for name in ("threads", "files", "handlers"):
        assert counts[1][name] == counts[2][name], name
        assert counts[0]["handlers"] == counts[1]["handlers"]
    assert max(count["elements"] for count in counts) < 2_000  # the model has 100,000


def test_each_call_has_a_folder_of_its_own(called):
    place, told = called
    assert told["folders"] == [str(place / name) for name in ("runs/sft", "runs/dpo", "again")]
    for folder in map(Path, told["folders"]):
        assert (folder / "model" / "model.safetensors").is_file()


def test_figures_are_the_runs(called):
    place, told = called
    assert told["figures"][2] == json.loads((place / "again" / "summary.json").read_text())
    assert told["figures"][2]["eval_loss_after"] < told["figures"][2]["eval_loss_before"]


def test_the_command_line_gives_the_same_weights(called):
    """To the bit, from the run's own config.yaml."""
    place, _ = called
    again = place / "by_command"
    ran = run_step(1, ["--config", place / "again" / "config.yaml", "--output_dir", again])
    assert ran.code == 0, ran.words
    mine, theirs = ((folder / "model" / "model.safetensors").read_bytes() for folder in (place / "again", again))
    assert mine == theirs
    assert mine != (place / "start" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_thirty_calls_hold_no_more_than_one(tmp_path):
    counts = _called(tmp_path, 30)[1]["counts"]
    for name in ("threads", "files", "handlers", "variables"):
        assert {json.dumps(count[name]) for count in counts[2:]} == {json.dumps(counts[2][name])}, name
    assert max(count["elements"] for count in counts) < 10_000


@pytest.mark.long
def test_ranks_that_a_call_launches(tmp_path, monkeypatch):
    import threestep

    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    start = save_start(tmp_path / "start")
    shared = {**SETTINGS, "data_output_path": tmp_path / "cache", "per_device_train_batch_size": 2}
    result = threestep.dpo(start, PAIRS, **shared, num_ranks=2, output_dir=tmp_path / "two")
    assert "2 ranks" in (result.folder / "config.yaml").read_text()
    assert result.figures["seconds"] > 0 and (result.model_folder / "model.safetensors").is_file()
    with pytest.raises(threestep.ThreestepError, match="^unknown argument lerning_rate; did you mean 'learning_rate'"):
        threestep.sft(start, ROWS, lerning_rate=1, num_ranks=2, output_dir=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
