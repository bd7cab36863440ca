"""The program: one run, several, pictures, mistakes."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.report import __main__ as report
from training.utils.base.errors import ThreestepError


@pytest.fixture
def run(tmp_path):
    def make(name: str):
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": step, "seconds": 1.0, "train/loss": 1.5, "eval/perplexity": 2.0} for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text("neftune_alpha: 0.0\n")
        return str(folder)

    return make


def test_one_run_has_its_page_in_its_folder(run, tmp_path, capsys):
    report.main([run("a")])
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'report.html'}\n"
    assert "<title>a · Threestep</title>" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")


def test_several_are_compared_where_it_is_started(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.main([run("a"), run("b")])
    assert "a and b" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_places_and_pictures(run, tmp_path, capsys):
    report.main([run("a"), "--out", str(tmp_path / "x" / "y.html"), "--png", str(tmp_path / "png")])
    assert capsys.readouterr().out.split() == [str(tmp_path / "x" / "y.html"), str(tmp_path / "png" / "sft_loss.png")]
    assert (tmp_path / "x" / "y.html").exists() and (tmp_path / "png" / "sft_loss.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expects one or more run folders: the --output_dir of a run"),
        (["a", "--ouut=x"], "unknown flag --ouut; did you mean 'out'?"),
        (["/no/such/run"], "expected a run's folder"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(ThreestepError, match="(?s).*".join(message.split("?")[:1]).replace("(", r"\(")):
        report.main(words)
