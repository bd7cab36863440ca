"""The calls of Trackio, see services.py."""

from __future__ import annotations

import sys
import types

from threestep.plugins.report.tests.trackers.services import Recorder, written


def test_trackio(tmp_path, monkeypatch):
    run = types.SimpleNamespace(name="brave-1")
    trackio = Recorder("trackio", init=run, Table="table")
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    written(tmp_path, ["trackio"])
    written(tmp_path, ["trackio"], done_steps=1)
    first, again = (named for _, named in trackio.named("init"))
    assert (first["project"], first["name"], first["resume"]) == ("threestep", None, "never")
    assert first["config"]["data_path"] == '["a"]'
    assert (again["name"], again["resume"]) == ("brave-1", "allow")
    assert trackio.named("log")[1] == (({"train/loss": 2.0},), {"step": 1})
    assert trackio.named("log")[2] == (({"samples": "table"},), {"step": 1})
    assert len(trackio.named("finish")) == 2
