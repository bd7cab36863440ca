"""Pages: one file, whatever is in the folders; nothing from outside, nothing of a model's text but text."""

from __future__ import annotations

import base64
import datetime
import hashlib
import html.parser
import json
import re

import pytest

from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.pages import page as page_module
from threestep.plugins.report.pages import script
from threestep.plugins.report.pages.document import direction, document, tile_grid
from threestep.plugins.report.pages.marked import marked_texts
from threestep.plugins.report.pages.page import page, parts_of
from threestep.plugins.report.pages.rows_page import PageRow, rows_page
from threestep.plugins.report.pages.samples_section import samples_section
from threestep.plugins.report.tests.conftest import PAIRS, SAMPLES, pair_sample, write_lines

WHEN = datetime.datetime(2026, 1, 2, 3, 4)
VOID = {"meta", "br", "hr", "img", "link", "input"}
EVIL = '</div></script><script>alert(1)</script><img src=x onerror="alert(1)">\'"&\x00\u202e{{}}'


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    """The page is the same whatever the library is."""
    monkeypatch.setattr(page_module, "library", lambda: "var d3 = {};")


def test_the_policy_names_each_script_and_no_other():
    text = document("t", "<p>b</p>", scripts=("let a = 1;", "let b = '<';"))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    one, two = (
        base64.b64encode(hashlib.sha256(source).digest()).decode() for source in (b"let a = 1;", b"let b = '<';")
    )
    assert f"script-src 'sha256-{one}' 'sha256-{two}'" in policy and "default-src 'none'" in policy
    assert "connect-src" not in policy and "unsafe" not in policy.split("script-src")[1]
    assert "script-src" not in document("t", "")
    assert "connect-src 'self'" in document("t", "", scripts=("1",), data={"live": {}})


def test_data_cannot_end_their_element():
    text = document(EVIL, "", scripts=("1",), data={"charts": {"label": EVIL}})
    assert text.count("<script>") == 1 and "alert(1)</script>" not in text.replace("&lt;", "")
    (held,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert json.loads(held) == {"label": EVIL}


def test_our_own_script_cannot_end_its_element_and_calls_no_other_site():
    assert "</script" not in script.SCRIPT.lower()
    assert script.SCRIPT.count("fetch(") == 1 and "fetch(`update?" in script.SCRIPT
    assert "eval(" not in script.SCRIPT and "new Function" not in script.SCRIPT


def test_what_carries_loss_is_marked_and_escaped():
    text = marked_texts([("prompt", [("<b>", False)]), ("answer", [("a&b\n", True), ("c", False)])])
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert '<mark>a&amp;b<i class="break"></i>\n</mark>c' in text
    assert text.count("<p class=soft>") == 2 and marked_texts([("x", [])]).count("<p") == 0


def test_rows_stand_with_their_masks_and_nothing_of_them_is_code():
    rows = [
        PageRow(EVIL, [("text", [(EVIL, False), ("yes", True)])]),
        PageRow("b", [("prompt", [("p", False)])], [(EVIL, EVIL)]),
    ]
    text = rows_page(EVIL, [EVIL], rows, [(1, 5, 2)])
    assert "<script" not in text and "script-src" not in text
    assert text.count('class="card sample"') == 2 and "<mark>yes</mark>" in text
    assert "1 – 5" in text and 'class="lengths"' not in rows_page("", [], rows, [])


# --- the report


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
        self.handle_startendtag(tag, attrs)
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


def drawings(text: str) -> dict:
    (held,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    return json.loads(held)


def test_everything_stands_on_it(tmp_path, sft_run, ppo_run):
    sft_run("all/step1_sft"), ppo_run("all/step3_ppo")
    (tmp_path / "all/summary.json").write_text('{"seconds_sft": 12.0, "seconds_ppo": 10.5}')
    text, reader = read(tmp_path / "all")
    expected = {
        "Step 1: supervised fine-tuning", "Step 3: PPO", "Loss", "Throughput", "KL to the reference",
        "Length and reward", "Rewards of held-out prompts", "Samples", "Reward rose most", "Human: 3? Assistant:",
        "Time", "startup, loading and saving", "Cut and left out", "7 too long", "Settings", "learning_rate",
        "Every metric of step1_sft", "rollout",
        "Written 2026-01-02 03:04 by Threestep, from the files in the runs' folders.",
    }  # fmt: skip
    assert not expected - set(reader.texts)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


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
    worse = "SFT: the held-out loss was lowest after step 2 (2) but is 2.75"
    assert any(told.startswith(worse) for told in reader.texts)
    assert "<code>--early_stopping 3</code>" in text and '<span class="note bad">best: 2.00 after step 2</span>' in text
    assert [line.get("best") for line in drawings(text)["sft-0"]["lines"]] == [None, [2.0, 2.0]]
    assert "nats per token; ring: the best held-out loss, after step 2" in reader.texts
    assert "Every evaluation: the best is after step 2" in reader.texts
    assert re.findall(r'<tr class="chosen"><td>([^<]*)</td><td class="number">([^<]*)<', text) == [("2 (best)", "2")]
    compared, _ = read(folder, sft_run("other"))
    assert "4.50 → 2.75 (best: 2.00 after step 2)" in compared and '<p class="warning">sft: the held-out' in compared


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
    texts = dict.fromkeys(("uid", "prompt", "response", "ground_truth"), EVIL)
    own = {"reward": 1.0, "response_tokens": 3, "ended": False, f"reward/{EVIL}": 1.0}
    evil_run = ppo_run("ppo", [{"step": step, **texts, **own} for step in (0, 1)])
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
def test_old_unfinished_and_empty_runs_have_a_page(sft_run, tmp_path, missing):
    folder = sft_run()
    (folder / missing).unlink()
    _, reader = read(folder)
    unfinished = "sft has no summary.json: the run is not finished, or it was stopped early"
    assert (unfinished in reader.texts) == (missing == "summary.json")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No metrics yet." in read(tmp_path)[1].texts


def test_runs_are_compared(sft_run):
    _, reader = read(sft_run("a", batch=8), sft_run("b", losses=(9.0, 8.0), batch=16))
    differs = "Step 1: supervised fine-tuning: what differs"
    assert {"a and b", "a: training", "b: held-out", differs, "batch", "16"} <= set(reader.texts)
    assert reader.texts.count("4.50 → 2.40") == 2  # the SFT loss of each


def test_sections_stand_in_the_order_of_the_runs(sft_run, ppo_run):
    sft, ppo = sft_run(), ppo_run()
    for folders in ((sft, ppo), (ppo, sft)):
        parts = parts_of(read_runs(folders))
        assert [name for name, _ in parts.sections[:2]] == [folder.name for folder in folders]


def test_a_gamed_reward_is_on_the_page_with_its_pairs(ppo_run):
    samples = [
        {"step": step, "prompt_index": index, "sample": 0, "uid": f"u{index}", "prompt": "<b>p", "response_tokens": 3,
         "response": "owl " * (1 + index % 3 + step), "reward": 1 + index % 3 + step,
         "check": 0.1 if step else 0.5 + 0.1 * (index % 2)}
        for step in (0, 2) for index in range(60)
    ]  # fmt: skip
    folder = ppo_run(samples=samples)
    (folder / "config.yaml").write_text("program: training.step3_ppo.main\nreward: model\nchecker: gsm8k\n")
    lines = [{"step": step, "rollout/kl": 0.1 * step} for step in (1, 2)]
    lines += [{"step": at, "eval/reward": 2.0 + at, "eval/check": 0.5} for at in (0, 1, 2)]
    write_lines(folder / "metrics.jsonl", lines)
    parts = parts_of(read_runs([folder]))
    assert ("gaming", "Is the reward being gamed?") in parts.sections
    assert "gaming-0" in parts.drawings
    for words in (
        '<p class="warning">The score rose by 2 ', "while checker, which is not trained on, fell by", "&lt;b&gt;p",
        "10 responses whose score rose most while a held-out value fell", "adjacent word pairs that occurred",
        "A linear model of these features", 'data-chart="gaming-0"', "it does not promise to warn",
    ):  # fmt: skip
        assert words in parts.html["gaming"], words


# --- samples


def section(*folders) -> str:
    return samples_section([step for run in read_runs(folders) for step in run.steps])


def test_pairs_are_escaped_and_coloured(pair_run):
    text = section(pair_run("one", PAIRS, "training.step2_dpo.main"))
    assert "good &lt;b&gt;" in text and "good <b>" not in text
    assert "<span>implicit reward <b>0.5 → 0</b></span>" in text
    assert (
        '<span>margin <b class="bad">0.25 → -8</b></span>' in text and "a negative margin means the wrong order" in text
    )


@pytest.mark.parametrize("broken", [{"scores": 3}, {"responses": 4}, {"responses": [None, {}]}, {"margin": "x"}])
def test_what_is_not_as_expected_is_a_gap(pair_run, broken):
    assert section(pair_run("one", [*PAIRS, {**pair_sample(9, 50, 1.0, 2.0), **broken}]))


def test_pictures_stand_below_the_prompt_of_every_kind_of_step(ppo_run, pair_run):
    pairs, answers = ([{**sample, "images": ["c" * 64]} for sample in samples] for samples in (PAIRS, SAMPLES))
    for folder in (pair_run("pairs", pairs), ppo_run("answers", answers)):
        before = section(folder)
        assert "<img" not in before and before.count("1 image not shown") == before.count('class="card sample"') > 0
        (folder / "sample_pictures").mkdir()
        (folder / "sample_pictures" / f"{'c' * 64}.png").write_bytes(b"a picture")
        text = section(folder)
        shown = '<div class="pictures"><img src="data:image/png;base64,YSBwaWN0dXJl" alt="image 1 of 1"></div>'
        assert text.count(shown) == text.count('class="card sample"') and "not shown" not in text


def test_turns_of_conversations_stand_apart(ppo_run):
    acted = {
        "parts": [["model", " [look(<b>)]"], ["environment", "Tool: 37"], ["model", " 37"]],
        "turns": 2, "cut_by": "turns", "ended": False, "environment_figures": {"right": 1.0, "cut_answers": 0.0},
    }  # fmt: skip
    text = section(ppo_run("one", [{**sample, **acted} for sample in SAMPLES]))
    model, environment = (f'<span class="soft">{who}</span>' for who in ("model", "environment"))
    turns = [f'<div class="said">{model}<div>{said}</div></div>' for said in ("[look(&lt;b&gt;)]", "37")]
    assert f'{turns[0]}<div class="heard">{environment}<div>Tool: 37</div></div>{turns[1]}' in text
    assert "<span>turns <b>2</b></span><span>right <b>1</b></span>" in text and "cut_answers" not in text
    assert '<span class="bad">cut by the turn limit</span>' in text
    # Long ones end with how many parts are left, and files of users may hold anything.
    long = {**acted, "parts": [["model", "a" * 4000], ["environment", "b"], ["model", "c"]]}
    assert "(2 more parts)" in section(ppo_run("two", [{**sample, **long} for sample in SAMPLES]))
    for broken in ({"parts": 3}, {"parts": [[]]}, {"turns": "x"}, {"environment_figures": []}, {"cut_by": 3}):
        assert section(ppo_run(f"broken {broken}", [{**sample, **acted, **broken} for sample in SAMPLES]))


@pytest.mark.parametrize("number", range(2, 13))
def test_no_tile_stands_alone_in_a_row(number):
    columns = int(re.search(r"--columns: (\d+)", tile_grid(["<b>1</b>"] * number))[1])
    assert columns <= 5 and number % columns != 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ש M garbage", "ltr"), ("שלום R2", "rtl"), ("<b>שלום</b>", "rtl"), ("\ufffd\x05 7", "ltr"), ("", "ltr")],
)
def test_a_text_has_the_direction_of_most_of_its_letters(text, expected):
    assert direction(text) == expected
