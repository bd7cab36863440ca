"""A run that overfits: its report marks the best step, its last line says that it got worse, and the model that it can
end with instead is the best one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.compared import figures
from tests.end_to_end.conftest import run_step, save_start
from tests.support.json_lines import write_lines

pytestmark = pytest.mark.timeout(900)  # on a busy machine

STEPS = 30
FLAGS = (
    f"--max_train_steps {STEPS} --num_train_epochs inf --per_device_train_batch_size 8 --learning_rate 5e-3 "
    "--dtype fp32 --max_seq_len 64 --report_mfu false --eval_fraction 0.25 --lr_scheduler_type constant"
)


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[str, Path]:
    """Answers that no prompt tells: what is learned of the training rows is wrong for the others."""
    root = place / "overfitting"
    root.mkdir()
    words = "red blue green dog cat house tree river".split()
    rows = [
        {"prompt": f"Human: {words[n % 8]} {words[n // 8]}? Assistant:", "chosen": f" {words[n * n * 7 % 11 % 8]}"}
        for n in range(32)
    ]
    write_lines(root / "rows.jsonl", [{**row, "rejected": " none"} for row in rows])
    flags = ["--model_name_or_path", save_start(root / "start"), "--data_path", f"jsonl:{root}/rows.jsonl"]
    flags += ["--data_split", "1,0,0", "--data_output_path", root / "cache", *FLAGS.split()]
    wanted = {"last": flags, "best": [*flags, "--load_best_model_at_end"], "ends": [*flags, "--eval_interval", 0]}
    for name, own in wanted.items():
        ran = run_step(1, [*own, "--output_dir", root / name])
        assert ran.code == 0, ran.words
    return {name: root / name for name in wanted}


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["eval/loss"] for line in figures(folder) if "eval/loss" in line}


def test_ten_evaluations_show_where_it_began_to_overfit(runs):
    by_step = losses(runs["last"])
    assert list(by_step) == list(range(0, STEPS + 1, STEPS // 10))
    best = min(by_step, key=by_step.__getitem__)
    assert 0 < best < STEPS and by_step[STEPS] > 1.05 * by_step[best]
    assert list(losses(runs["ends"])) == [0, STEPS] and losses(runs["ends"])[STEPS] == by_step[STEPS]


def test_the_best_model_can_be_kept(runs):
    by_step = losses(runs["best"])
    assert by_step == losses(runs["last"])
    best = min(by_step, key=by_step.__getitem__)
    assert json.loads((runs["best"] / "summary.json").read_text())["eval_loss_after"] == by_step[best]
    text = (runs["best"] / "report.html").read_text()
    assert "made it worse" not in text and f"from the best step, {best}" in text
