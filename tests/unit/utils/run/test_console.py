"""Log lines: rank 0 speaks, the others are silent."""

from __future__ import annotations

from training.utils.run.console import log


def test_only_rank_0_speaks(capsys):
    log("one")
    log("two", is_main_rank=False)
    assert capsys.readouterr().out == "one\n"
