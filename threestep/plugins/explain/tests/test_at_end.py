"""Explanations at the end of a run: of each record that it asked for, and a failure is a line of the log."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from threestep.plugins.explain import at_end
from threestep.plugins.explain.at_end import explain_at_end
from training.utils.run.run_folder import EndedRun, RunFolder

pytestmark = pytest.mark.unit


def test_explanations_are_made_of_records(tmp_path: Path, monkeypatch, capsys):
    calls: list[Any] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        failed = "update2" in words[3]
        return subprocess.CompletedProcess(words, int(failed), "", "one\nthe model is too large\n" if failed else "")

    monkeypatch.setattr(at_end.subprocess, "run", run)
    for name in ("step_000002", "step_000004_update1", "step_000004_update2"):
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "record.json").write_text("{}")
    explain_at_end(EndedRun(RunFolder(tmp_path, True), {"explain_steps": [4, 2, 9]}, True))
    assert [Path(words[3]).name for words in calls] == ["step_000002", "step_000004_update1", "step_000004_update2"]
    assert calls[0][-1] == str(tmp_path / "explained" / "step_000002")
    said = capsys.readouterr()
    words = said.out + said.err
    assert "step 4 is not explained: the model is too large" in words
    assert "step 9 is not explained: it has no record" in words
    assert str(tmp_path / "explained" / "step_000004_update1" / "explained.html") in words
