"""The project's programs as cases: their metrics and memory, on texts that are made up on the spot."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.competitions import COMPETITIONS
from benchmarks.gpu_day import machine
from benchmarks.gpu_day.record import NotHere, Report
from benchmarks.workload import Workload, make_workload
from training.utils.base.errors import ThreestepError

ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
NO_TRACKERS = ("--report_to", "none")  # TensorBoard is not carried
WARM_UP_STEPS = 3
_WORDS = (
    "ann ben apples sells market each half twice price day week total left gives box cars pays more than how".split()
)


@dataclass(frozen=True)
class Trained:
    """lines: of metrics.jsonl. peak_bytes: on the GPU."""

    lines: list[dict[str, Any]]
    peak_bytes: int

    def curve(self, metric: str) -> list[float]:
        return [line[metric] for line in self.lines if metric in line]

    def steady(self, metric: str) -> float:
        """Return the median after the first steps, which warm up."""
        values = self.curve(metric)
        return statistics.median(values[WARM_UP_STEPS:] or values)


def train(report: Report, module: str, flags: Sequence[str], name: str, variables: Mapping[str, str] = {}) -> Trained:  # noqa: B006
    """Run a step's program in the folder `name`."""
    folder = report.place / name
    words = [
        "-m",
        "benchmarks.gpu_day.watched",
        f"training.{module}.main",
        *flags,
        *NO_TRACKERS,
        "--overwrite",
        "--output_dir",
        str(folder),
    ]
    said = ran(report, words, variables)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Trained(lines, json_lines(said, "peak_bytes")[-1]["peak_bytes"])


def training_case(report: Report, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each step of `benchmarks.gpu_day.training_case`."""
    return json_lines(ran(report, ["-m", "benchmarks.gpu_day.training_case", *flags]), "seconds")


def trained_by_trl(report: Report, trainer: str, steps: int, flags: Sequence[str]) -> tuple[float, float]:
    """Return the units a second of TRL's trainer on the made-up texts (median after the first steps), and its peak in
    GiB. NotHere where TRL is not installed."""
    if machine.version("trl") is None:
        raise NotHere("trl is not installed, and nothing can be fetched")
    program = Path(__file__).parents[1] / "competitors" / "trl_peer.py"
    words = [str(program), "--trainer", trainer, "--workload", str(made_up_workload(report).folder)]
    said = ran(report, [*words, "--dtype", "bf16", "--steps", str(steps), *flags])
    peaks = json_lines(said, "peak_bytes")
    return median_rate(said), machine.gib(peaks[-1]["peak_bytes"] if peaks else 0)


def median_rate(said: str) -> float:
    """Return the median units a second of a competitor's lines, after the steps that warm up."""
    rates = [line["units"] / line["seconds"] for line in json_lines(said, "units")]
    return statistics.median(rates[WARM_UP_STEPS:] or rates)


def ran(report: Report, words: Sequence[str], variables: Mapping[str, str] = {}) -> str:  # noqa: B006
    """Return what `python WORDS` printed. MemoryError if it ran out of memory, ThreestepError if it failed."""
    done = report.run(words, {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        if "out of memory" in done.stderr.lower():
            raise MemoryError(last)
        raise ThreestepError(f"{words[1]} ended with code {done.returncode}: {last}")
    return done.stdout


def json_lines(text: str, key: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and f'"{key}"' in line]


def made_up_workload(report: Report) -> Workload:
    """Return the benchmarks' workload on questions with answers of GSM8K's lengths, of random words."""
    folder = report.out / "workload"
    shape, rows = ("1300m", 6000) if report.full else ("tiny", 160)
    if not (folder / shape / "done").exists():
        _write_questions(folder / "data", rows)
    return make_workload(folder, shape, folder / "data")


def _write_questions(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dice, questions, solutions = random.Random(0), list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(rows):
        question, answer, wrong = (_text(dice, low, high) for low, high in ((20, 90), (40, 180), (40, 180)))
        answer = f"{answer} #### {number}"
        questions.append({"question": question, "answer": answer})
        solved = {"is_correct": False, "solution": wrong}
        solutions.append({"question": question, "ground_truth": answer, "6b": solved})
    for name, lines in (("train.jsonl", questions), ("model_solutions.jsonl", solutions)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _text(dice: random.Random, low: int, high: int) -> str:
    return " ".join(dice.choices(_WORDS, k=dice.randint(low, high)))


def flags_of(name: str, workload: Workload, report: Report, steps: int, competitor: str = "Threestep") -> list[str]:
    """Return the flags of the project's own competitor in `python -m benchmarks NAME`."""
    settings = {"dtype": "bf16", "steps": steps, "without_trl": True, "folder": str(report.out)}
    rows = {"max_seq_len": 2048 if report.full else 128, "attn_implementation": "sdpa"}
    command = COMPETITIONS[name](workload, argparse.Namespace(**settings, **rows)).commands[competitor]
    return command[command.index("--") + 1 :]
