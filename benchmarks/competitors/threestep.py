"""Threestep itself, by its own program: runs a step's main and prints what metrics.jsonl says of each step.

python -m benchmarks.competitors.threestep --step step1_sft --unit tokens --output_dir DIR -- FLAGS OF THE STEP
python -m benchmarks.competitors.threestep --step step1_sft --unit samples --samples 8 --output_dir DIR -- ...
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

WITHIN_ROLLOUT = "weights_to_vllm"  # reported in addition to the rollout, which includes it


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", required=True)
    parser.add_argument("--unit", default="tokens", choices=("tokens", "pairs", "samples", "steps"))
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, help="of an optimizer step, with --unit samples")
    parser.add_argument(
        "--count_reference", action="store_true", help="DPO: add the seconds that reading the reference took a pair"
    )
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", f"training.{arguments.step}.main", "--output_dir", arguments.output_dir]
    shutil.rmtree(arguments.output_dir, ignore_errors=True)  # a run that was interrupted left checkpoints there
    subprocess.run([*command, *arguments.flags], check=True, stdout=subprocess.DEVNULL)
    name, before = f"train/{arguments.unit}_per_second", 0.0
    ended: float | None = None
    for line in (Path(arguments.output_dir) / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)
        if arguments.count_reference and "reference/pairs_per_second" in figures:
            before = 1.0 / figures["reference/pairs_per_second"]
        if arguments.unit == "steps" and "time/7_learn" in figures:
            parts = {key.removeprefix("time/"): value for key, value in figures.items() if key.startswith("time/")}
            parts = {part: value for part, value in parts.items() if part not in ("evaluation", "checkpoint")}
            seconds = sum(value for part, value in parts.items() if part != WITHIN_ROLLOUT)
            print(json.dumps({"units": 1.0, "seconds": seconds, "parts": parts}), flush=True)
        if arguments.unit == "samples":  # from the end of one step to the end of the next, as the clock of TRL's
            if ended is not None and "train/loss" in figures:
                print(json.dumps({"units": arguments.samples, "seconds": figures["seconds"] - ended}), flush=True)
            ended = figures["seconds"]
        if name in figures:
            print(json.dumps({"units": 1.0, "seconds": 1.0 / figures[name] + before}), flush=True)


if __name__ == "__main__":
    main()
