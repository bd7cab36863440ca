"""The calls of Weights & Biases, see services.py."""

from __future__ import annotations

import sys

from threestep.plugins.report.tests.trackers.services import SETTINGS, Recorder, written
from training.utils.contracts.trackers import TrackedRun


def test_wandb(tmp_path, monkeypatch):
    run = Recorder("run")
    run.id = "abc"
    wandb = Recorder("wandb", init=run, Table="table")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    written(tmp_path, ["wandb"])
    written(tmp_path, ["wandb"], done_steps=1)
    written(tmp_path, [])  # another run in the same folder
    assert not (tmp_path / "tracker_runs.json").exists()
    first, again = (named for _, named in wandb.named("init"))
    assert (first["project"], first["name"], first["config"]) == ("mine", TrackedRun(tmp_path, {}, 8).name, SETTINGS)
    assert (first["id"], first["resume"]) == (None, None)
    assert (again["id"], again["resume"]) == ("abc", "allow")  # a resumed run goes on
    assert run.named("define_metric")[0] == (("*",), {"step_metric": "step"})
    assert [words[0] for words, _ in run.named("log")][:3] == [
        {"step": 0, "eval/loss": 3.0, "eval/perplexity": 20.0}, {"step": 1, "train/loss": 2.0},
        {"step": 1, "samples": "table"},
    ]  # fmt: skip
    assert run.named("finish")[0] == ((), {"exit_code": 0})
