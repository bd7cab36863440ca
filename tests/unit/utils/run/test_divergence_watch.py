"""Signs are said once, noted for the report, and not said again by a run that is resumed."""

from __future__ import annotations

import json
import math

from training.utils.run.divergence import WINDOW, DivergenceWatch, Uniform
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import DIVERGENCE, LOGS

NAMES = (Uniform(math.log(100), "all 100 tokens"), "train/loss", "eval/loss")
LOSSES = [2.0] * WINDOW + [4.61] * (WINDOW + 3)


def run(folder, steps, first=0):
    with MetricsWriter(folder, True, first) as metrics:
        watch = DivergenceWatch(folder, True, *NAMES[:2], eval_loss=NAMES[2])
        for step in range(first, steps):
            figures = {"train/loss": LOSSES[step], "train/grad_norm": 1.0}
            metrics.write(step + 1, figures)
            watch.see(step + 1, figures)
        return watch.closing()


def test_a_sign_is_said_once_and_stands_in_the_last_line(tmp_path, capsys):
    closing = run(tmp_path, len(LOSSES))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert said.startswith(f"warning: step {2 * WINDOW}: the loss has risen to 4.61 nats")
    assert closing.startswith("; warning: the loss has risen to 4.61 nats")
    (noted,) = [json.loads(line) for line in (tmp_path / DIVERGENCE).read_text().splitlines()]
    assert noted["step"] == 2 * WINDOW and noted["sentence"] in said
    assert DIVERGENCE in LOGS  # it is cut with the others when a run is resumed


def test_a_resumed_run_knows_what_was_before(tmp_path, capsys):
    run(tmp_path, WINDOW + 5)
    assert "warning" not in capsys.readouterr().out
    run(tmp_path, 2 * WINDOW + 1, first=WINDOW + 5)
    assert capsys.readouterr().out.count("warning") == 1
    assert "has risen" in run(tmp_path, len(LOSSES), first=2 * WINDOW + 1)
    assert "warning" not in capsys.readouterr().out  # said before it was resumed
    assert len((tmp_path / DIVERGENCE).read_text().splitlines()) == 1


def test_a_healthy_run_leaves_no_file(tmp_path):
    assert run(tmp_path, WINDOW) == "" and not (tmp_path / DIVERGENCE).exists()


def test_other_ranks_write_nothing(tmp_path, capsys):
    watch = DivergenceWatch(tmp_path, False)
    for step in range(5):
        watch.see(step, {"train/grad_norm": 0.0})
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_a_resumed_run_counts_the_steps_that_were_skipped_before(tmp_path):
    """metrics.jsonl writes their norm as null."""
    for first, steps in ((0, 2), (2, 4)):
        with MetricsWriter(tmp_path, True, first) as metrics:
            watch = DivergenceWatch(tmp_path, True)
            for step in range(first, steps):
                figures = {"critic/grad_norm": math.inf, "train/loss": 1.0}
                metrics.write(step + 1, figures)
                watch.see(step + 1, figures)
            closing = watch.closing()
    assert closing.startswith("; warning: critic/grad_norm has not been finite for the last 4 steps")
