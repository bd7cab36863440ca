"""The benchmark of steps that are laid out ahead, of the long form: it trains, the same either way."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import ahead


@pytest.mark.long
@pytest.mark.timeout(300)  # on a busy machine
def test_both_forms_train_to_the_same_loss(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ahead", "--turns", "1", "--steps", "4", "--sequences", "8"])
    ahead.main()
    said = capsys.readouterr().out
    found = re.findall(r"turn 1: (\w+): [\d.]+ s between steps, [\d.]+ s of processor, last loss ([\d.]+)", said)
    assert [form for form, _ in found] == ["asked", "ahead"] and len({loss for _, loss in found}) == 1, said
