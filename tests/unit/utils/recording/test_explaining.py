"""Explanations at the end of a run: of each record that it asked for, and a failure is a line of the log."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.engine.ranks.startup import Ranks
from training.utils.recording import explaining
from training.utils.recording.explaining import explain_at_end
from training.utils.recording.recorder import NOT_RECORDED, WatchedStep, records_of
from training.utils.run.run_arguments import RunArguments

pytestmark = pytest.mark.unit


def test_a_step_to_be_explained_is_recorded_with_its_values(tmp_path: Path):
    import torch

    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    records = records_of(RunArguments(output_dir=str(tmp_path), explain_steps=[2], record_steps=[3], digests=False))
    two, three = records.of_step(2, ranks), records.of_step(3, ranks)
    assert isinstance(two, WatchedStep) and two.keeps_values
    assert isinstance(three, WatchedStep) and not three.keeps_values
    assert records.of_step(1, ranks) is NOT_RECORDED


@pytest.mark.parametrize("flag", ["explain_steps", "record_steps"])
def test_rows_over_several_ranks_are_not_recorded(flag: str):
    from training.utils.sequence_parallel.checks import check_beside

    mistakes = Mistakes()
    check_beside(mistakes, 1, RunArguments(**{flag: [2]}).recording)
    mistakes.raise_if_any()
    check_beside(mistakes, 2, RunArguments(**{flag: [2]}).recording)
    with pytest.raises(ThreestepError, match=f"--sequence_parallel_size 2 cannot go with --{flag} yet"):
        mistakes.raise_if_any()


def test_explanations_are_made_of_records(tmp_path: Path, monkeypatch, capsys):
    calls: list[Any] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        failed = "update2" in words[3]
        return subprocess.CompletedProcess(words, int(failed), "", "one\nthe model is too large\n" if failed else "")

    monkeypatch.setattr(explaining.subprocess, "run", run)
    for name in ("step_000002", "step_000004_update1", "step_000004_update2"):
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "record.json").write_text("{}")
    explain_at_end(tmp_path, [4, 2, 9])
    assert [Path(words[3]).name for words in calls] == ["step_000002", "step_000004_update1", "step_000004_update2"]
    assert calls[0][-1] == str(tmp_path / "explained" / "step_000002")
    said = capsys.readouterr()
    words = said.out + said.err
    assert "step 4 is not explained: the model is too large" in words
    assert "step 9 is not explained: it has no record" in words
    assert str(tmp_path / "explained" / "step_000004_update1" / "explained.html") in words


def test_parallel_paths_have_no_records_to_explain():
    mistakes = Mistakes()
    RunArguments(explain_steps=[1]).check_records(mistakes, parallel_thinking=True)
    assert "--explain_steps expects sequences" in str(mistakes.sentences)
