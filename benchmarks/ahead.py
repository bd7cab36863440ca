"""Seconds between the optimizer steps of SFT on a CPU, laid out when they are asked for and by a thread before.

    python -m benchmarks.ahead [--turns 2] [--steps 8] [--sequences 256]

A program of its own for each run, in turns; a tiny model, so that laying out is a large part of a step. On a CPU a run
uses no such thread (`TrainingRun.prepares_ahead`): this measures whether it should. Processor seconds are of the whole
process, and tell on a busy machine what the clock does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORMS = ("asked", "ahead")
_DATA = "--data_path embedded --data_split 1,0,0 --max_seq_len 128 --max_eval_rows 8 --num_workers 1"
_RUN = (
    "--learning_rate 1e-3 --dtype fp32 --report_mfu false --report_to none --report false --num_train_epochs 50 "
    "--eval_interval 0"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--turns", 2), ("--steps", 8), ("--sequences", 256)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--one", choices=FORMS, help=argparse.SUPPRESS)
    given, flags = parser.parse_known_args()
    if given.one:
        _run_one(given.one == "ahead", flags)
        return
    with tempfile.TemporaryDirectory() as place:
        _program(
            "threestep.plugins.programs.new_model",
            "--out",
            f"{place}/model",
            *"--data_path embedded --hidden_size 32".split(),
        )
        flags = [*f"--model_name_or_path {place}/model --data_output_path {place}/cache {_DATA} {_RUN}".split()]
        flags += ["--per_device_train_batch_size", str(given.sequences), "--max_train_steps", str(given.steps)]
        for turn in range(given.turns):
            for form in FORMS:
                said = _program("benchmarks.ahead", "--one", form, *flags, "--output_dir", f"{place}/{form}{turn}")
                print(f"turn {turn + 1}: {form}: {said.splitlines()[-1]}", flush=True)


def _program(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def _run_one(in_background: bool, flags: list[str]) -> None:
    """Train, and print the medians of the steps after the first two."""
    from training.step1_sft.main import main as sft
    from training.utils.setup import training_run

    run: Any = training_run.TrainingRun
    loop: Any = training_run.TrainingLoop
    record, marks = loop.record, list[tuple[float, float]]()

    def noted(*given: Any) -> None:
        record(*given)
        marks.append((time.perf_counter(), time.process_time()))

    run.prepares_ahead = property(lambda self: in_background)
    loop.record = noted
    sft(flags)
    between = [
        (after[0] - before[0], after[1] - before[1]) for before, after in zip(marks[1:], marks[2:], strict=False)
    ]
    clock, processor = (statistics.median(column) for column in zip(*between, strict=True))
    losses = [json.loads(line).get("train/loss") for line in _metrics(flags).read_text().splitlines()]
    last = [loss for loss in losses if loss is not None][-1]
    print(f"{clock:.4f} s between steps, {processor:.4f} s of processor, last loss {last!r}")


def _metrics(flags: list[str]) -> Path:
    return Path(flags[flags.index("--output_dir") + 1]) / "metrics.jsonl"


if __name__ == "__main__":
    main()
