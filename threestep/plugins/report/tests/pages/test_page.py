"""One file, whatever is in the folders: nothing from outside, nothing of a model's text but text."""

from __future__ import annotations

import datetime
import html.parser
import json
import re

import pytest

from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.pages import page as page_module
from threestep.plugins.report.pages.page import page

WHEN = datetime.datetime(2026, 1, 2, 3, 4)
VOID = {"meta", "br", "hr", "img", "link", "input"}
EVIL = '</div></script><script>alert(1)</script><img src=x onerror="alert(1)">\'"&\x00\u202e{{}}'


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    """The page is the same whatever the library is."""
    monkeypatch.setattr(page_module, "library", lambda: "var d3 = {};")


class Reader(html.parser.HTMLParser):
    """Every element, attribute and text; asserts that each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["script"]:
            self.texts.append(data)


def read(*folders) -> tuple[str, Reader]:
    text = page(read_runs(folders), WHEN)
    return text, Reader(text)


def test_everything_stands_on_it(tmp_path, sft_run, ppo_run):
    sft_run("all/step1_sft"), ppo_run("all/step3_ppo")
    (tmp_path / "all/summary.json").write_text('{"seconds_sft": 12.0, "seconds_ppo": 10.5}')
    text, reader = read(tmp_path / "all")
    for word in (
        "Step 1: supervised fine-tuning", "Step 3: PPO", "Loss", "Throughput", "KL to the reference",
        "Length and reward", "Rewards of held-out prompts", "Samples", "Rose most", "Human: 3? Assistant:", "Time",
        "start-up, loading and saving", "Cut and left out", "7 too long", "Settings", "learning_rate",
        "Every metric of step1_sft", "rollout",
        "Written 2026-01-02 03:04 by Threestep, from the files in the runs' folders.",
    ):  # fmt: skip
        assert word in reader.texts, word
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def drawings(text: str) -> dict:
    (held,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    return json.loads(held)


def test_the_numbers_are_those_of_metrics_jsonl(sft_run):
    folder = sft_run(losses=tuple(5.0 / step for step in range(1, 31)))
    loss = drawings(read(folder)[0])["sft-0"]["lines"][0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert list(zip(loss["xs"], loss["ys"], strict=True)) == [
        (line["step"], float(f"{line['train/loss']:.6g}")) for line in lines if "train/loss" in line
    ]


def test_the_best_step_is_marked_and_a_run_that_got_worse_says_so(sft_run):
    folder = sft_run(losses=(4.0, 3.0, 2.5, 2.0))
    lines = [{"step": at, "seconds": 2.0, "eval/loss": loss} for at, loss in ((2, 2.0), (3, 2.2), (4, 2.75))]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    text, reader = read(folder)
    assert any(
        told.startswith("SFT: the held-out loss was lowest after step 2 (2) and is 2.75") for told in reader.texts
    )
    assert "<code>--early_stopping 3</code>" in text and '<span class="note bad">best: 2 after step 2</span>' in text
    assert [line.get("best") for line in drawings(text)["sft-0"]["lines"]] == [None, [2.0, 2.0]]
    assert "nats a token; ring: the best evaluation, after step 2" in reader.texts
    assert "Every evaluation: the best is after step 2" in reader.texts
    assert re.findall(r'<tr class="chosen"><td>([^<]*)</td><td class="number">([^<]*)<', text) == [("2 (best)", "2")]
    compared, _ = read(folder, sft_run("other"))
    assert "4.5 → 2.75 (best: 2 after step 2)" in compared and '<p class="warning">sft: the held-out' in compared


def test_without_the_library_the_page_is_there_and_says_what_is_missing(sft_run, monkeypatch):
    monkeypatch.setattr(page_module, "library", lambda: None)
    _, reader = read(sft_run())
    assert any("pip install mpld3" in text for text in reader.texts) and "script" not in reader.tags
    assert "Every metric of sft" in reader.texts


def test_nothing_comes_from_outside(sft_run, ppo_run):
    text, reader = read(sft_run(), ppo_run())
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    targets = [value for name, value in reader.attributes if name in ("href", "src", "srcset", "data", "action")]
    assert targets and all(target.startswith("#") for target in targets)
    assert not any(name.startswith("on") for name, _ in reader.attributes)  # the policy would not run them
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))
    assert "default-src 'none'" in dict(reader.attributes)["content"] or "default-src 'none'" in text


def test_a_models_text_is_text(sft_run, ppo_run):
    samples = [
        {"step": step, "uid": EVIL, "prompt": EVIL, "response": EVIL, "ground_truth": EVIL, "reward": 1.0,
         "response_tokens": 3, "ended": False, f"reward/{EVIL}": 1.0}
        for step in (0, 1)
    ]  # fmt: skip
    evil_run = ppo_run("ppo", samples)
    folder = sft_run("<b>run", **{f"<i>{EVIL}": EVIL, "other": [EVIL]})
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "seconds": 1.0, f"train/{EVIL}": 1.0}) + "\n")
    report = {"train": {"rows": 1, "tokens": 2, "truncated": EVIL, "dropped": {EVIL: 3}}}
    (folder / "data_report.json").write_text(json.dumps(report))
    _, plain = read(sft_run("plain"), ppo_run("plain_ppo"))
    _, reader = read(folder, evil_run)
    assert set(reader.tags) <= set(plain.tags)
    assert {name for name, _ in reader.attributes} <= {name for name, _ in plain.attributes}
    assert any("<script>alert(1)</script>" in text for text in reader.texts)  # shown as it is


def test_numbers_that_are_none_break_nothing(sft_run):
    text, reader = read(sft_run(losses=(None, 2.0, float("nan"), float("inf"), 3.0)))
    assert drawings(text)["sft-0"]["lines"][0]["ys"] == [None, 2.0, None, None, 3.0]
    assert any("training: 3 values not finite" in told for told in reader.texts)
    read(sft_run("none", losses=(None, None)))


@pytest.mark.parametrize("missing", ["config.yaml", "summary.json", "metrics.jsonl", "data_report.json"])
def test_old_and_unfinished_runs_have_a_page(sft_run, missing):
    folder = sft_run()
    (folder / missing).unlink()
    _, reader = read(folder)
    unfinished = "sft has no summary.json: the run continues, or it was stopped before its end"
    assert (unfinished in reader.texts) == (missing == "summary.json")


def test_an_empty_run_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    _, reader = read(tmp_path)
    assert "No metrics yet." in reader.texts


def test_runs_are_compared(sft_run):
    _, reader = read(sft_run("a", batch=8), sft_run("b", losses=(9.0, 8.0), batch=16))
    for word in (
        "a and b",
        "a: training",
        "b: held-out",
        "Step 1: supervised fine-tuning: what differs",
        "batch",
        "16",
    ):
        assert word in reader.texts, word
    assert reader.texts.count("4.5 → 2.4") == 2  # the SFT loss of each
