"""What do digests cost? Step 1 in one process, its steps in turns with a digest and without, on the same rows.

    python -m benchmarks.digests [--shape 5m] [--rows 16] [--words 150] [--steps 60] [--folder runs/digests]
        [-- MORE FLAGS OF STEP 1]

Every batch is the whole of the data, in the data's order. Timed are processor seconds of this process, which other
programs on the machine move least, and wall seconds. Of the digests every second one has the layers, and in a run every
fourth: the price is three quarters of the median difference of neighbours without them and a quarter of that with them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workload import SHAPES, VOCABULARY
from threestep.plugins.audit.recording.schema import DIGESTS
from threestep.plugins.audit.step_recorder import StepRecorder
from threestep.plugins.programs import new_model
from training.step1_sft.main import main as sft
from training.step1_sft.trainer import SftTrainer
from training.utils.contracts.run import NOT_OBSERVED

FIRST = 4  # steps that warm up
_WORDS = "pear apple fig plum cherry quince lemon melon grape berry peach mango date lime olive papaya".split()


def main() -> None:
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/digests")
    parser.add_argument("--shape", choices=SHAPES, default="5m")
    for name, value in (("--rows", 16), ("--words", 150), ("--steps", 60)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("flags", nargs="*", help="flags of step 1, after --")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = _write_rows(folder / "rows.jsonl", 2 * arguments.rows + 8, arguments.words)
    model = _model(folder, arguments.shape)
    seconds: list[tuple[float, float]] = []
    _watch(seconds)
    words = "--max_seq_len 512 --max_eval_rows 1 --eval_interval 0 --shuffle false --dtype fp32 --num_train_epochs "
    words += str(arguments.steps)
    places = ["--model_name_or_path", str(model), "--output_dir", str(folder / "run"), "--data_output_path"]
    data = [str(folder / "cache"), "--data_path", f"jsonl:{rows}", "--data_split", "1,0,0", "--overwrite"]
    size = [
        "--max_train_rows",
        str(arguments.rows),
        "--per_device_train_batch_size",
        str(arguments.rows),
        "--save_at_end",
        "false",
    ]
    sft([*places, *data, *size, *words.split(), *arguments.flags])
    lines = (folder / "run" / DIGESTS).read_text().splitlines()
    print(summary(seconds[FIRST:], len(lines[-1])))


def summary(seconds: Sequence[tuple[float, float]], size: int) -> str:
    """The closing lines. seconds: of the processor and of the clock, of a step without a digest and one with it, in
    turns. size: bytes of a line."""
    found = []
    for name, column in zip(("processor", "clock"), zip(*seconds, strict=True), strict=True):
        more = [b - a for a, b in zip(column[::2], column[1::2], strict=False)]
        plain, layered = statistics.median(more[::2]), statistics.median(more[1::2])
        usual, price = statistics.median(column[::2]), 0.75 * plain + 0.25 * layered
        found.append(
            f"{name}: {1e3 * usual:.2f} ms a step without; a digest {1e3 * plain:.3f} ms, {1e3 * layered:.3f} ms with "
            f"layers; {price / usual:.2%} of a step"
        )
    return "\n".join([*found, f"{len(seconds) // 2} pairs, {size:,} bytes a line"])


def _watch(seconds: list[tuple[float, float]]) -> None:
    """Time each step of step 1, and leave every second one without a digest."""
    take, begin = SftTrainer._optimizer_step, StepRecorder.begin

    def timed(self: SftTrainer, step: Any) -> dict[str, float]:
        used, clock = time.process_time(), time.perf_counter()
        figures = take(self, step)
        seconds.append((time.process_time() - used, time.perf_counter() - clock))
        return figures

    def in_turns(self: StepRecorder, number: int, update: int | None = None) -> Any:
        return begin(self, number, update) if number % 2 == 0 else NOT_OBSERVED

    SftTrainer._optimizer_step = timed  # type: ignore[method-assign]
    StepRecorder.begin = in_turns  # type: ignore[method-assign]


def _write_rows(path: Path, count: int, words: int) -> Path:
    dice = random.Random(0)
    rows = [{"prompt": "List:", "chosen": " " + " ".join(dice.choices(_WORDS, k=words))} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _model(folder: Path, shape: str) -> Path:
    hidden, layers, heads, intermediate = SHAPES[shape]
    place = folder / shape
    if not place.exists():
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": intermediate,
        }
        words = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
        new_model.main(["--data_path", "embedded", "--out", str(place), *words])
    return place


if __name__ == "__main__":
    main()
