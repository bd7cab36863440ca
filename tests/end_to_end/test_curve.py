"""Packed and padded runs of step 1 draw the same loss curve: a short form of `python -m benchmarks.curve`."""

from __future__ import annotations

import pytest

from benchmarks import curve
from benchmarks.curve import Curves, draw, trained_twice
from tests.support.forked_programs import run_python

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def forked(command: list[str]) -> None:
    done = run_python(["-m", *command], folder=curve.ROOT)
    assert done.returncode == 0, done.stderr


def test_packed_and_padded_curves_lie_on_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(curve, "_run", forked)
    small = "--per_device_train_batch_size 16 --num_warmup_steps 2 --max_eval_rows 50".split()
    curves = trained_twice(tmp_path, 20, small)
    # Evaluations before training, and as many as 20 x 16 rows hold 50.
    assert len(curves.packed) == 20 and len(curves.eval_packed) == 1 + 320 // 50
    assert curves.packed[-1] < curves.packed[0] - 1.0
    assert curves.packed != curves.padded  # they are computed in different ways
    assert curves.largest_difference < 1e-4
    draw(curves, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_largest_difference_looks_everywhere():
    assert Curves([1.0, 2.0], [1.0, 2.5], [3.0], [3.0]).largest_difference == 0.5
    assert Curves([1.0, 2.0], [1.0, 2.0], [3.0], [2.0]).largest_difference == 1.0
