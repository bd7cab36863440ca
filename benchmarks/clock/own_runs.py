"""The clock of `--dry_run --device cpu` beside runs of step 1 on this machine's CPU.

    python -m benchmarks.clock.own_runs [--settings 20] [--steps 10] [--folder runs/clock]

Every setting runs twice with the same flags: with `--dry_run`, whose seconds of a step are the estimate, and for
`--steps` optimizer steps, whose median of train/tokens_per_second is the measurement. Rows are texts longer than
`--max_seq_len`, so that every row is full. No constant of the clock was chosen by these runs. Prints every ratio, and
how many are within 15 %. Other programs on the machine change both sides, at different times.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
WITHIN = 0.15
_WARM_UP = 2  # steps
_WIDTHS, _TOKENS, _ROWS, _RECOMPUTES = ((128, 2), (256, 4), (512, 4)), (128, 384), (2, 8), (False, True)


class Setting(NamedTuple):
    """A model of `layers` layers of `width`, and a step of `rows` rows of `tokens` tokens."""

    width: int
    layers: int
    tokens: int
    rows: int
    recomputes: bool

    def flags(self, folder: Path) -> list[str]:
        """The command line of step 1, without what to do."""
        return [
            "--model_name_or_path", str(folder / f"model_{self.width}_{self.layers}"),
            "--data_path", str(folder / "rows.jsonl"), "--max_seq_len", str(self.tokens), "--dtype", "fp32",
            "--per_device_train_batch_size", str(self.rows), "--gradient_checkpointing", str(self.recomputes).lower(),
        ]  # fmt: skip


def main() -> None:
    """Make models and rows, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("runs/clock"))
    arguments = parser.parse_args()
    folder, ratios = arguments.folder.resolve(), list[float]()
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl")
    for setting in settings(arguments.settings):
        make_model(setting, folder)
        estimate = estimated_rate(setting, folder)
        measured = measured_rate(setting, folder, arguments.steps)
        ratios.append(estimate / measured)
        print(
            f"{setting}: {estimate:,.0f} estimated, {measured:,.0f} measured tokens/s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    close = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(f"within {WITHIN:.0%}: {close} of {len(ratios)}; median ratio {statistics.median(ratios):.2f}")


def settings(count: int) -> list[Setting]:
    """The first `count` settings, spread over all."""
    every = [Setting(*shape, *rest) for rest in product(_TOKENS, _ROWS, _RECOMPUTES) for shape in _WIDTHS]
    return every[:count]


def write_rows(path: Path) -> None:
    """Write 400 texts that are longer than any row."""
    texts = ({"prompt": f"{number}", "response": f" {number % 7} and {number % 11}" * 400} for number in range(400))
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))


def make_model(setting: Setting, folder: Path) -> None:
    """Make the model of a setting unless it is there."""
    place = folder / f"model_{setting.width}_{setting.layers}"
    shape = ["--hidden_size", str(setting.width), "--num_hidden_layers", str(setting.layers), "--vocab_size", "400"]
    if not place.exists():
        _run("training.new_model", "--data_path", "embedded", *shape, "--out", str(place))


def estimated_rate(setting: Setting, folder: Path) -> float:
    """Tokens a second by a dry run."""
    said = _run("training.step1_sft.main", *setting.flags(folder), "--dry_run", "true", "--device", "cpu")
    found = re.search(r"one step +([\d.,]+)", said)
    assert found is not None, said
    return setting.rows * setting.tokens / float(found[1].replace(",", ""))


def measured_rate(setting: Setting, folder: Path, steps: int) -> float:
    """The median of a run's tokens a second, without its first steps."""
    run = folder / "run"
    flags = ["--max_train_steps", str(steps), "--output_dir", str(run), "--overwrite", "true", "--eval_interval", "0"]
    _run("training.step1_sft.main", *setting.flags(folder), *flags)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/tokens_per_second"] for line in lines if "train/tokens_per_second" in line]
    return statistics.median(rates[_WARM_UP:])


def _run(module: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{module} {' '.join(flags)} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
