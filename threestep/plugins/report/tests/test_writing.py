"""The page is written whole or not at all; at the end of a run a failure is one line."""

from __future__ import annotations

import pytest
import yaml

from threestep.plugins.programs import all_steps
from threestep.plugins.programs.tests.test_all_steps import VALUES, steps  # noqa: F401 (a fixture)
from threestep.plugins.report import writing
from threestep.plugins.report.writing import end_run, report_at_end, worse_at_end, write_report
from training.utils.base.errors import ThreestepError
from training.utils.run.run_folder import EndedRun, RunFolder


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
    assert worse_at_end(folder) == ""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "eval/loss": 5.5}\n')
    assert worse_at_end(folder).startswith(
        "; warning: the held-out loss was lowest after step 3 (2.4) and is 5.5 after step 3: "
    )
    assert worse_at_end(folder / "empty") == ""


@pytest.mark.parametrize("trains", [True, False])
def test_a_run_ends_with_its_page_and_the_card_of_its_model(sft_run, trains):
    folder = sft_run()
    (folder / "model").mkdir()
    settings = {"report": True, "push_to_hub": False}
    assert end_run(EndedRun(RunFolder(folder, True), settings, trains)) == ""
    assert (folder / "report.html").is_file() and (folder / "model" / "README.md").is_file() == trains


@pytest.mark.usefixtures("steps")
def test_a_whole_run_has_a_page(tmp_path, capsys):
    all_steps.main(["--config", "run.yaml"])
    assert capsys.readouterr().out.endswith("report: runs/x/report.html\n")
    assert "Step 3: PPO" in (tmp_path / "runs/x/report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("steps")
def test_no_report_on_request(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**VALUES, "report": False}))
    all_steps.main(["--config", "run.yaml"])
    assert "report" not in capsys.readouterr().out and not (tmp_path / "runs/x/report.html").exists()
    settings = yaml.safe_load((tmp_path / "runs/x/configs/step1_sft.yaml").read_text())
    assert settings["report"] is False


def test_neither_yes_nor_no_is_a_mistake():
    with pytest.raises(ThreestepError, match="expected report to be true or false, got 'no'"):
        all_steps.read_plan({**VALUES, "report": "no"}, "f")
