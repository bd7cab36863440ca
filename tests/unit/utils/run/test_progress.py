"""Progress bars and lines: rank 0 speaks, the others are silent."""

from __future__ import annotations

import re
import sys
import threading
from types import SimpleNamespace

import pytest

from training.utils.base.console import LogPace, log
from training.utils.run import progress
from training.utils.run.progress import ShownFigure, progress_bar, show

EVERY_STEP = LogPace(0.0)


def loss(value: float) -> ShownFigure:
    return ShownFigure("loss", value, ".1f")


@pytest.fixture
def clock(monkeypatch):
    """Seconds by which a test's clock is ahead."""
    ahead = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: ahead[0])
    return ahead


def test_the_bar_is_silent_on_other_ranks(capsys):
    for is_main in (True, False):
        with progress_bar(2, "SFT", is_main) as bar:
            show(bar, loss(1.0))
            show(bar, loss(0.5))
        said = capsys.readouterr().err
        assert ("loss 0.5" in said and "step 2 of 2" in said) == is_main
        assert bool(said) == is_main


@pytest.mark.parametrize(
    ("pace", "seconds_of_a_step", "expected"),
    [
        (LogPace(60.0), 1.0, [1, 61, 121, 181, 200]),  # a line a minute
        (LogPace(60.0), 100.0, list(range(1, 201))),  # a step takes longer than a minute: every step
        (LogPace(), 0.001, [1, 200]),  # a short run: its first and its last step
        (LogPace(60.0, waits=True), 1.0, [60, 120, 180]),  # nothing before a minute, nor at the end
        (LogPace(60.0, waits=True), 0.001, []),
    ],
)
def test_a_log_has_a_line_at_its_pace(capsys, clock, pace, seconds_of_a_step, expected):
    with progress_bar(200, "SFT", True, pace=pace) as bar:
        for step in range(1, 201):
            clock[0] += seconds_of_a_step
            show(bar, loss(step))
            log("between")
    lines = capsys.readouterr().err.splitlines()
    assert [int(re.match(r"SFT: step (\d+) of 200, ", line)[1]) for line in lines] == expected


def test_a_line_has_means_since_the_last_one(capsys, clock):
    with progress_bar(5000, "SFT", True) as bar:
        for step in (1, 2, 3, 4):
            clock[0] += 30.0
            show(
                bar,
                loss(step),
                ShownFigure("learning rate", step * 1e-5, ".2e", is_mean=False),
                ShownFigure("", 5e3, ",.0f", "tok/s"),
            )
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"SFT: step 1 of 5,000, loss 1.0, learning rate 1.00e-05, 5,000 tok/s, [\d:]+ left", first)
    assert re.fullmatch(r"SFT: step 3 of 5,000, loss 2.5, learning rate 3.00e-05, 5,000 tok/s, [\d:]+ left", second)


def test_a_figure_that_not_every_step_has(capsys, clock):
    with progress_bar(3, "PPO", True, unit="rollout", pace=EVERY_STEP) as bar:
        show(bar, loss(1.0))
        show(bar, ShownFigure("cut", 0.25, ".0%"), loss(2.0))
    assert capsys.readouterr().err.splitlines()[-1].startswith("PPO: rollout 2 of 3, cut 25%, loss 2.0, ")


def test_a_resumed_run_counts_on(capsys):
    with progress_bar(10, "SFT", True, done=7, pace=EVERY_STEP) as bar:
        show(bar, loss(1.0))
    assert capsys.readouterr().err.startswith("SFT: step 8 of 10, loss 1.0, ")


def test_several_steps_are_counted_at_once(capsys, clock):
    with progress_bar(1000, "data", True, unit="row", done=200, pace=LogPace(seconds=10.0, waits=True)) as bar:
        for _ in range(4):
            clock[0] += 6.0
            show(bar, ShownFigure("", 50.0, ",.0f", "rows/s", is_mean=False), steps=200)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r", [0-9:]+ left", "", line) for line in lines] == [
        "data: row 600 of 1,000, 50 rows/s", "data: row 1,000 of 1,000, 50 rows/s"
    ]  # fmt: skip


def test_bars_without_figures(capsys):
    with progress_bar(1, "reference", True) as bar:
        bar.update(1)
    assert capsys.readouterr().err == "reference: step 1 of 1\n"
    with progress_bar(10, "data", True, on_terminal_only=True) as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_bar(4, "SFT", True) as bar:
        bar.mininterval = 0.0
        show(bar, loss(1.0), ShownFigure("", 5.0, ",.0f", "tok/s"))
    said = capsys.readouterr().err
    assert re.search(r"SFT: +25%.*1/4 \[\d\d:\d\d<\d\d:\d\d, .*loss 1.0, 5 tok/s", said)


class Notebook:
    """IPython in a notebook's kernel, as far as a bar knows it; `shown` has the texts of each output in turn."""

    def __init__(self, monkeypatch, has_kernel=True):
        self.shown: list[list[str]] = []
        shell = SimpleNamespace(kernel=object()) if has_kernel else SimpleNamespace()
        display = SimpleNamespace(HTML=str, display=self._display)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def _display(self, text, display_id):
        assert display_id is True
        self.shown.append([text])
        return SimpleNamespace(update=self.shown[-1].append)


def test_a_notebook_has_one_output_for_a_bar_and_no_line(monkeypatch, capsys):
    notebook = Notebook(monkeypatch)
    with progress_bar(3, "SFT <1>", True, done=1) as bar:
        show(bar, loss(1.0))
        show(bar, loss(0.5))
    (texts,) = notebook.shown
    assert texts[0].startswith('<progress value="1" max="3"></progress> SFT &lt;1&gt;: step 1 of 3')
    assert texts[-1] == '<progress value="3" max="3"></progress> SFT &lt;1&gt;: step 3 of 3, loss 0.5'
    assert capsys.readouterr() == ("", "")
    with progress_bar(2, "SFT", False) as bar:  # another rank's
        show(bar, loss(1.0))
    assert len(notebook.shown) == 1


def test_ipython_on_a_terminal_is_no_notebook(monkeypatch, capsys):
    notebook = Notebook(monkeypatch, has_kernel=False)
    with progress_bar(1, "SFT", True) as bar:
        show(bar, loss(1.0))
    assert not notebook.shown and "step 1 of 1" in capsys.readouterr().err


def test_a_bar_leaves_no_thread():
    before = threading.enumerate()
    with progress_bar(2, "SFT", True) as bar:
        show(bar, loss(1.0))
    assert threading.enumerate() == before
