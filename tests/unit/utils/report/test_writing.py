"""The page is written whole or not at all; at the end of a run a failure is one line."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.report import writing
from training.utils.report.writing import report_at_end, worse_at_end, write_report
from training.utils.run.run_folder import RunFolder


def test_the_page_is_written(tmp_path, ppo_run):
    samples = [{"step": 0, "prompt": "größer \ud83d", "response": "ok", "reward": 1.0}]  # half a pair: no UTF-8
    out = write_report([ppo_run(samples=samples)], tmp_path / "new" / "page.html")
    assert "größer ?" in out.read_text(encoding="utf-8")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path, sft_run):
    (tmp_path / "file").write_text("")
    with pytest.raises(ThreestepError, match="cannot write the report to .*file/page.html: "):
        write_report([sft_run()], tmp_path / "file" / "page.html")


def test_at_the_end_of_a_run(sft_run, capsys):
    folder = sft_run()
    report_at_end(folder, is_wanted=False)
    assert capsys.readouterr().out == "" and not (folder / "report.html").exists()
    report_at_end(folder, is_wanted=True)
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    assert (folder / "report.html").exists()


def test_a_failure_at_the_end_warns(sft_run, capsys, monkeypatch):
    folder = sft_run()

    def fail(*_):
        raise ZeroDivisionError("of course")

    monkeypatch.setattr(writing, "page", fail)
    report_at_end(folder, is_wanted=True)
    said = capsys.readouterr().out
    assert said.startswith("warning: no report was written (ZeroDivisionError: of course)") and said.count("\n") == 1


def test_a_run_that_got_worse_ends_its_last_line_so(sft_run, capsys):
    folder = sft_run()
    assert worse_at_end(RunFolder(folder, True)) == ""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "eval/loss": 5.5}\n')
    assert worse_at_end(RunFolder(folder, True)).startswith(
        "; warning: the held-out loss was lowest after step 3 (2.4) and is 5.5 after step 3: "
    )
    assert worse_at_end(RunFolder(folder, False)) == ""  # one rank prints it
    assert worse_at_end(RunFolder(folder / "empty", True)) == ""
