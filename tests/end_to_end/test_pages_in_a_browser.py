"""Pages as a browser shows them: charts are drawn, zoomed and followed, nothing is wider than a phone, no script fails.

With THREESTEP_AXE=axe.min.js (npm install axe-core), axe-core judges the pages too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import threading
from pathlib import Path

import pytest

from tests.support.browser import Browser, chromium, opened_browser
from tests.support.image_readers import picture
from threestep.plugins.evaluation.best_of.curve import curve_of
from threestep.plugins.evaluation.best_of.page import best_of_page
from threestep.plugins.evaluation.best_of.results import table_rows
from threestep.plugins.evaluation.pairs_page import page as pairs_page
from threestep.plugins.report.live import LivePage, make_server
from threestep.plugins.report.pages.rows_page import PageRow, rows_page
from threestep.plugins.report.writing import write_report
from threestep.plugins.serving.access import Door
from training.utils.run.run_folder import RunFolder

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("mpld3") is None, reason="needs the package mpld3: pip install mpld3"),
]
LOSS = 'figure[data-chart="sft-0"]'
LONG_WORD = "supercalifragilistic" * 12


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as opened:
        yield opened


def make_run(folder: Path, steps: int) -> Path:
    folder.mkdir()
    lines = [{"step": 0, "seconds": 1.0, "eval/loss": 5.0}]
    for step in range(1, steps + 1):
        loss = 1 + 4 * math.exp(-step / steps * 5)
        others = {"train/token_accuracy": step / 200, "train/tokens_per_second": 1e4 + step}
        others["train/learning_rate"] = 1e-4 / step
        lines.append({"step": step, "seconds": 1.0 + step, "train/loss": loss, "train/grad_norm": 1 / step, **others})
    lines.append({"step": steps, "seconds": 2.0 + steps, "eval/loss": 1.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = f"program: training.step1_sft.main\nlearning_rate: 0.5\nneftune_alpha: 0.0\ndata_path: [{LONG_WORD}]\n"
    (folder / "config.yaml").write_text(settings)
    return folder


def judged(browser: Browser) -> None:
    """Nothing is wider than the screen, no script failed, and axe-core (where it is) finds nothing serious."""
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.problems == []
    if os.environ.get("THREESTEP_AXE"):
        browser.evaluate(Path(os.environ["THREESTEP_AXE"]).read_text(encoding="utf-8"))
        found = browser.evaluate("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))")
        assert [each for each in found if each[0] in ("serious", "critical")] == []


def legend(browser: Browser) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll('{LOSS} .legend b')].map(b => b.textContent)")


def steps_shown(browser: Browser) -> list[float]:
    texts = browser.evaluate(f"[...document.querySelectorAll('{LOSS} .axis text')].map(t => t.textContent)")
    return [float(text) for text in texts]


def test_charts_are_drawn_zoomed_and_read(browser, tmp_path):
    page = write_report([make_run(tmp_path / "run", 100)], tmp_path / "report.html")
    browser.show(page.as_uri())
    browser.wait(f"document.querySelector('{LOSS} svg')")
    assert browser.evaluate("document.querySelectorAll('.plot svg').length") == 5
    marks = f"document.querySelectorAll('{LOSS} circle.mark').length"
    lines = f"document.querySelectorAll('{LOSS} path.dashed').length"
    assert (browser.evaluate(marks), browser.evaluate(lines)) == (2, 0)  # two values are points and no line
    assert legend(browser) == ["1.027", "1.1"] and steps_shown(browser)[-1] == 100
    browser.evaluate(f"document.querySelector('{LOSS}').scrollIntoView()")
    box = browser.evaluate(f"document.querySelector('{LOSS} .plot').getBoundingClientRect().toJSON()")
    browser.press(box["left"] + 60, box["top"] + 90, to=box["left"] + 120)
    assert max(steps_shown(browser)) < 50
    browser.evaluate(f"document.querySelector('{LOSS} [data-log]').click()")
    assert browser.evaluate(f"document.querySelector('{LOSS} [data-log]').getAttribute('aria-pressed')") == "true"
    browser.evaluate("document.querySelector('[data-zoom=all]').click()")
    assert steps_shown(browser)[-1] == 100
    browser.evaluate(f"document.querySelector('{LOSS} [data-line=\"0\"]').click()")
    assert browser.evaluate(f"document.querySelectorAll('{LOSS} path.line').length") == 0
    judged(browser)


@pytest.mark.parametrize("dark", [False, True])
def test_every_page_fits_a_phone(browser, tmp_path, dark):
    runs = [make_run(tmp_path / "a", 30), make_run(tmp_path / "b", 3)]
    for folder in (tmp_path / "a", tmp_path):
        RunFolder(folder, True).write_medium(f"{'c' * 64}.png", picture(128, 128), "picture")
    sample = {"prompt": LONG_WORD, "answers": [LONG_WORD, "b"], "scores": [1.0, 0.5], "ground_truth": LONG_WORD}
    sample["images"] = ["c" * 64] * 9
    answered = {"step": 0, "prompt": LONG_WORD, "response": LONG_WORD, "loss": 1.0, "images": ["c" * 64] * 9}
    (tmp_path / "a" / "samples.jsonl").write_text(json.dumps(answered) + "\n")
    report = write_report(runs, tmp_path / "report.html")
    rows = [PageRow(LONG_WORD, [("prompt", [(LONG_WORD, False)]), ("chosen", [(LONG_WORD, True)])], [("x", LONG_WORD)])]
    drawn = {"prompt": LONG_WORD, "responses": [LONG_WORD, "b"], "reward": [1.0, 0.0], "check": [0.0, 1.0]}
    drawn |= {"ended": [True, False]}
    curve = curve_of([drawn], seed=1)
    head, *cells = table_rows(curve)
    others = {
        "win.html": pairs_page(
            "win_rate",
            {"win_rate": "0.5 (0.4 to 0.6)"},
            [LONG_WORD, "b"],
            [sample],
            folder=tmp_path,
            settings={"reward model": LONG_WORD},
        ),
        "rows.html": rows_page("phase 2", [LONG_WORD], rows, [(1, 5, 3)]),
        "best_of.html": best_of_page(LONG_WORD, (LONG_WORD, LONG_WORD), curve, (head, cells), drawn=[drawn]),
    }
    for name, text in others.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for page in (report, *(tmp_path / name for name in others)):
        browser.show(page.as_uri(), width=360, height=740, dark=dark)
        judged(browser)


def test_two_evaluations_of_several_runs_are_lines(browser, tmp_path):
    """Beside a curve of training a line between two values would say what nobody measured."""
    for name in "ab":
        (tmp_path / name).mkdir()
        lines = [{"step": at, "eval/reward": at + 1.0, "rollout/score": 1.0, "rollout/reward": 0.5} for at in (0, 20)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / name / "config.yaml").write_text("program: training.step3_ppo.main\n")
    browser.show(write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html").as_uri())
    browser.wait("document.querySelectorAll('figure[data-chart=\"ppo-0\"] path.dashed').length === 2")
    judged(browser)


def test_a_page_follows_its_run_and_keeps_what_was_opened(browser, tmp_path):
    folder = make_run(tmp_path / "run", 20)
    door = Door()
    server = make_server(LivePage([folder]), 0, door)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        browser.show(door.address(server.server_address[1]))
        browser.wait(f"document.querySelector('{LOSS} svg')")
        browser.evaluate("window.stays = true; document.querySelector('#sft details').open = true")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 21, "seconds": 50.0, "train/loss": 0.125}\n')
        browser.wait(f"document.querySelector('{LOSS} .legend b').textContent === '0.125'")
        assert browser.evaluate("window.stays && document.querySelector('#sft details').open")  # not loaded again
        assert [problem for problem in browser.problems if "404" not in problem] == []  # a browser asks for an icon
        browser.problems.clear()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
