"""Progress bars and lines: rank 0 speaks, the others are silent."""

from __future__ import annotations

import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from training.utils.base.console import LogPace, log
from training.utils.base.errors import ThreestepError
from training.utils.run import phase_clock, progress
from training.utils.run.ahead import Ahead
from training.utils.run.phase_clock import PhaseClock, gpu_wait, timed
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
    assert [int(re.match(r"SFT: step (\d+) of 200\b", line)[1]) for line in lines] == expected


def test_a_line_has_means_since_the_last_one(capsys, clock):
    with progress_bar(5000, "SFT", True) as bar:
        for step in (1, 2, 3, 4):
            clock[0] += 30.0
            rate = ShownFigure("learning rate", step * 1e-5, ".2e", is_mean=False)
            show(bar, loss(step), rate, ShownFigure("", 5e3, ",.0f", "tok/s"))
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"SFT: step 1 of 5,000, loss 1.0, learning rate 1.00e-05, 5,000 tok/s, [\d:]+ left", first)
    assert re.fullmatch(
        r"SFT: step 3 of 5,000 \(means of 2 steps\), loss 2.5, learning rate 3.00e-05, 5,000 tok/s, [\d:]+ left", second
    )


def test_several_steps_are_counted_at_once(capsys, clock):
    with progress_bar(1000, "data", True, unit="row", done=200, pace=LogPace(seconds=10.0, waits=True)) as bar:
        for _ in range(4):
            clock[0] += 6.0
            show(bar, ShownFigure("", 50.0, ",.0f", "rows/s", is_mean=False), steps=200)
    lines = [re.sub(r", [0-9:]+ left", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == ["data: row 600 of 1,000, 50 rows/s", "data: row 1,000 of 1,000, 50 rows/s"]


def test_bars_of_a_resumed_run_of_few_figures_and_of_none(capsys):
    with progress_bar(10, "PPO", True, unit="rollout", done=7, pace=EVERY_STEP) as bar:
        show(bar, loss(1.0))
        show(bar, ShownFigure("cut", 0.25, ".0%"), loss(2.0))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("PPO: rollout 8 of 10, loss 1.0, ")
    assert second.startswith("PPO: rollout 9 of 10, cut 25%, loss 2.0, ")
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
    terminal = Notebook(monkeypatch, has_kernel=False)  # IPython there
    with progress_bar(1, "SFT", True) as bar:
        show(bar, loss(1.0))
    assert not terminal.shown and "step 1 of 1" in capsys.readouterr().err


@pytest.fixture
def tick(monkeypatch):
    """tick(seconds) lets time pass."""
    now = [100.0]
    monkeypatch.setattr(phase_clock.time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_phases_add_up_to_the_time_that_passed(tick):
    clock = PhaseClock()
    tick(1)
    with clock.phase("learn"):
        tick(2)
        with clock.phase("reward"):  # inside another: its 4 seconds are its own alone
            tick(4)
        tick(8)
    with clock.phase("learn"):
        tick(16)
    tick(32)
    assert clock.read() == {"other": 33.0, "learn": 26.0, "reward": 4.0}
    tick(64)
    with pytest.raises(KeyError), clock.phase("learn"):
        tick(1)
        raise KeyError
    assert clock.read() == {"other": 64.0, "learn": 1.0}  # begun anew, and a phase that raises is closed


def test_a_timed_method_is_a_phase_and_keeps_its_name_and_result(tick):
    class Loop:
        def __init__(self) -> None:
            self.clock = PhaseClock()

        @timed("7_learn")
        def learn(self, seconds: float) -> str:
            """Learn."""
            tick(seconds)
            return "done"

    loop = Loop()
    assert loop.learn(seconds=3.0) == "done" and loop.learn.__doc__ == "Learn."
    assert loop.clock.read()["7_learn"] == 3.0


def test_a_gpu_is_waited_for_at_every_border():
    waits = []
    clock = PhaseClock(wait=lambda: waits.append(1))
    with clock.phase("learn"):
        assert len(waits) == 1
    assert len(waits) == 2
    assert gpu_wait(torch.device("cpu")) is None


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "threestep ahead"]


@pytest.mark.parametrize("in_background", [True, False])
def test_each_thing_is_made_once_and_by_a_thread_if_asked(in_background):
    made: list[tuple[int, bool]] = []

    def make(item: int) -> int:
        made.append((item, threading.current_thread() is threading.main_thread()))
        return 10 * item

    ahead: Ahead[int, int] = Ahead(make, in_background)
    found = []
    for item in range(4):
        found.append(ahead.made(item))
        if item < 3:
            ahead.begin(item + 1)
    ahead.close()
    assert found == [0, 10, 20, 30] and names() == []
    assert made == [(item, not in_background or item == 0) for item in range(4)]


def test_another_item_than_was_begun_is_made_now_and_an_error_reaches_the_loop():
    def make(item: int) -> int:
        if item == 7:
            raise ThreestepError("row 7 is broken; mend it")
        return -item

    ahead: Ahead[int, int] = Ahead(make, True)
    ahead.begin(1)
    assert ahead.made(2) == -2 and ahead.made(1) == -1
    ahead.begin(7)
    with pytest.raises(ThreestepError, match="row 7 is broken; mend it"):
        ahead.made(7)


def test_closing_waits_for_the_thread():
    going = threading.Event()
    ahead: Ahead[int, bool] = Ahead(lambda item: going.wait(10.0), True)
    ahead.begin(1)
    assert names() == ["threestep ahead"]
    threading.Timer(0.05, going.set).start()
    ahead.close()
    assert names() == []
