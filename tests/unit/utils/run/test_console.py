"""Log lines and the progress bar: rank 0 speaks, the others are silent."""

from __future__ import annotations

import re

from training.utils.run.console import log, progress_bar, show


def test_the_bar_is_silent_on_other_ranks(capsys):
    for is_main in (True, False):
        with progress_bar(2, "step 1", is_main) as bar:
            show(bar, "loss 1.0")
            show(bar, "loss 0.5")
        said = capsys.readouterr().err
        assert ("loss 0.5" in said and "step 2 of 2" in said) == is_main
        assert bool(said) == is_main


def test_a_log_has_a_line_at_each_tenth(capsys):
    with progress_bar(200, "step 1", True) as bar:
        for step in range(1, 201):
            show(bar, f"loss {step}, 5 tok/s")
            log("between")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"step 1: step 20 of 200, loss 20, 5 tok/s, \d\d:\d\d left", lines[0])
    assert lines[-1] == "step 1: step 200 of 200, loss 200, 5 tok/s"
    with progress_bar(10, "step 1", True, done=7) as bar:  # a resumed run
        show(bar, "a")
    assert capsys.readouterr().err.startswith("step 1: step 8 of 10, a, ")
    with progress_bar(1, "reference", True) as bar:  # without figures
        bar.update(1)
    assert capsys.readouterr().err == "reference: step 1 of 1\n"
    with progress_bar(10, "data", True, on_terminal_only=True) as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_bar(4, "step 1", True) as bar:
        bar.mininterval = 0.0
        show(bar, "loss 1.0, 5 tok/s")
    said = capsys.readouterr().err
    assert re.search(r"step 1: +25%.*1/4 \[\d\d:\d\d<\d\d:\d\d, .*loss 1.0, 5 tok/s", said)


def test_only_rank_0_speaks(capsys):
    log("one")
    log("two", is_main_rank=False)
    assert capsys.readouterr().out == "one\n"
