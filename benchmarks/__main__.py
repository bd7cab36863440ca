"""One command, one table of ratios.

    python -m benchmarks sft --data_dir ../shared/data/gsm8k [--shape 25m] [--dtype fp32] [--rounds 3] [--steps 10]

NAME: sft, sft_images and grpo_images (conversations about pictures), reward, reward_half (prompts are half of the
tokens), dpo, kto (rows marked one by one), orpo, ranked2, ranked4, ranked8 (K responses a prompt, shared and unshared),
ppo, grpo (a whole step each), rollout (generation alone), speculation, speculation8, speculation4 (32, 8 and 4
sequences, by guesses and without), speculation_step (a whole step so), speculation_embedded, speculation_embedded_step
(4 sequences of the embedded task), vllm64, vllm256 (so many sequences by hf and by vLLM), vllm_step (a whole step by
each), experience (what follows a rollout), overhead (the same rows without the engine), head (the loss at a vocabulary
of 128,000), data (raw rows to cached tokens, and what opening a cached split costs).

On a GPU the same commands run there, and the peak is that of the GPU's memory:

    python -m benchmarks sft --data_dir ... --shape 1300m --dtype bf16 --max_seq_len 2048 \\
        --attn_implementation flex_attention

Competitors take turns (A B C, A B C, ...), so that a machine whose speed drifts slows all of them; each figure is a
median over the steady steps of undisturbed rounds, and only ratios are claims. A round is disturbed if other processes
and steal took more than --most_disturbed of the cores in one of its runs (/proc/stat); a claim takes three undisturbed
rounds. TRL runs in an environment of its own, made on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.competitions import COMPETITIONS, Competition
from benchmarks.competitors.threestep import WITHIN_ROLLOUT
from benchmarks.floors import floor_flops, floor_lines
from benchmarks.machine import (
    MOST_DISTURBED,
    Load,
    closing_line,
    is_disturbed,
    load_between,
    read_counters,
    undisturbed,
)
from benchmarks.workload import SHAPES, make_workload

ROOT = Path(__file__).parents[1]
# The first steps of a process warm caches and allocators up.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """rates: units a second of each steady step. peak_bytes: the most memory that the process, or a child, held.
    parts: of each steady step the seconds of its parts by name, if reported. load: what else the machine did, if it
    tells."""

    rates: list[float]
    peak_bytes: int
    parts: list[dict[str, float]]
    load: Load | None = None


def main() -> None:
    """Run the rounds, print the table, write JSON."""
    arguments = _arguments()
    workload = make_workload(Path(arguments.folder), arguments.shape, Path(arguments.data_dir))
    competition = selected(COMPETITIONS[arguments.name](workload, arguments), arguments.only)
    runs: dict[str, list[Measured]] = {name: [] for name in competition.commands}
    for turn in range(arguments.rounds):
        for name, command in competition.commands.items():
            run = _run(command, arguments.threads)
            runs[name].append(run)
            print(f"round {turn + 1}: {name}: {_told(run, arguments.most_disturbed)}", file=sys.stderr, flush=True)
    _report(arguments, competition, runs, floor_flops(arguments.name, workload, arguments.shape))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(COMPETITIONS))
    parser.add_argument("--data_dir", required=True, help="GSM8K's files as published")
    parser.add_argument("--shape", default="25m", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--most_disturbed",
        type=float,
        default=MOST_DISTURBED,
        metavar="SHARE",
        help="a round in which others and steal took more of all cores' time (0 to 1) than this is not quoted",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", default="runs/benchmarks")
    parser.add_argument("--without_trl", action="store_true")
    parser.add_argument("--max_seq_len", type=int, default=512, help="Threestep's; rows are as wide or, flex, wider")
    parser.add_argument("--attn_implementation", default="sdpa", help="Threestep's; the floor and TRL have theirs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these competitors, the first of them compared")
    arguments = parser.parse_args()
    if arguments.only:  # whose environment takes minutes to make
        arguments.without_trl |= not any(name.startswith("TRL") for name in arguments.only)
    return arguments


def selected(competition: Competition, names: Sequence[str] | None) -> Competition:
    """Return the competition among `names`, in their order; among all if there are none. Exits for unknown names."""
    if not names:
        return competition
    unknown = [name for name in names if name not in competition.commands]
    if unknown:
        known, wrong = (", ".join(f"'{name}'" for name in names) for names in (competition.commands, unknown))
        sys.exit(f"--only expects one or more of {known}, got {wrong}")
    return replace(competition, commands={name: competition.commands[name] for name in names})


def _run(command: list[str], threads: int) -> Measured:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        before = read_counters()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=error, text=True)
        on_gpu = _GpuPeak()
        # wait4 knows what the process and its own children used; Popen's wait does not.
        _, status, usage = os.wait4(process.pid, 0)
        peak_bytes = on_gpu.stop() or usage.ru_maxrss * 1024
        load = load_between(before, read_counters())
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        error.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with code {process.returncode}:\n{error.read()[-3000:]}")
        return replace(_measured(command, out, peak_bytes), load=load)


def _measured(command: list[str], lines: Iterable[str], peak_bytes: int) -> Measured:
    """Read the steps out of what a competitor wrote to stdout."""
    steps = [json.loads(line) for line in lines if line.startswith('{"units"')]
    if len(steps) <= WARM_UP_STEPS:
        sys.exit(f"{' '.join(command)} reported {len(steps)} steps; {WARM_UP_STEPS} of them only warm up")
    steady = steps[WARM_UP_STEPS:]
    return Measured(
        [step["units"] / step["seconds"] for step in steady], peak_bytes, [step.get("parts", {}) for step in steady]
    )


class _GpuPeak:
    """The most memory used on the first GPU, asked for ten times a second by nvidia-smi: the same for every competitor.
    0 where there is none."""

    def __init__(self) -> None:
        self._most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if shutil.which("nvidia-smi"):
            self._thread.start()

    def _watch(self) -> None:
        ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not self._ended.wait(0.1):
            output = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
            if output.isdigit():
                self._most_bytes = max(self._most_bytes, int(output) * 2**20)

    def stop(self) -> int:
        self._ended.set()
        return self._most_bytes


def _parts_table(runs: dict[str, list[Measured]]) -> list[str]:
    """Table lines: each competitor's median seconds of a step's parts, if reported, and in brackets first / its."""
    rows: dict[str, dict[str, float]] = {}
    for name, many in runs.items():
        parts = [each for run in many for each in run.parts]
        if parts and parts[0]:
            rows[name] = {part: statistics.median(each[part] for each in parts) for part in parts[0]}
    columns = list(dict.fromkeys(part for row in rows.values() for part in row))
    lines = [f"| seconds a step | {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"] if rows else []
    for name, row in rows.items():
        base = next(iter(rows.values()))
        ratios = {part: f" ({base[part] / row[part]:.2f})" if part in base else "" for part in row if row[part]}
        cells = [f"{row[part]:.3f}{ratios[part]}" if part in ratios else "" for part in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _sending_shares(runs: dict[str, list[Measured]]) -> list[str]:
    """Lines: for each competitor that sends weights to vLLM, the median share of a step or rollout that this takes. The
    other parts add up to the whole, and one of them includes the sending."""
    lines = []
    for name, many in runs.items():
        shares = [
            parts[WITHIN_ROLLOUT] / sum(value for part, value in parts.items() if part != WITHIN_ROLLOUT)
            for run in many
            for parts in run.parts
            if WITHIN_ROLLOUT in parts
        ]
        if shares:
            lines.append(f"{name}: sending the weights is {100 * statistics.median(shares):.2f} % of the seconds")
    return lines


def _figure(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 10 else f"{rate:.3f}"


def _told(run: Measured, most_disturbed: float) -> str:
    disturbed = " (disturbed, not quoted)" if is_disturbed(run.load, most_disturbed) else ""
    return f"{_figure(statistics.median(run.rates))}; {run.load or 'the load of the machine is not known'}{disturbed}"


def _report(
    arguments: argparse.Namespace,
    competition: Competition,
    runs: dict[str, list[Measured]],
    flops: dict[str, float],
) -> None:
    """flops: the least that a unit takes, by competitor."""
    peaks = {name: max(run.peak_bytes for run in many) for name, many in runs.items()}
    loads = [[many[turn].load for many in runs.values()] for turn in range(arguments.rounds)]
    quoted = undisturbed(loads, arguments.most_disturbed)
    kept = {name: [many[turn] for turn in quoted] for name, many in runs.items()}
    medians = {
        name: statistics.median(rate for run in many for rate in run.rates) for name, many in kept.items() if many
    }
    settings = (arguments.shape, arguments.dtype, f"{arguments.threads} threads", f"{arguments.rounds} rounds")
    print(", ".join((arguments.name, *settings)))
    if quoted:
        for line in [*_table(competition.unit, kept, peaks), *_parts_table(kept), *_sending_shares(kept)]:
            print(line)
    floors = floor_lines(flops, medians, _matmul_rate(arguments), competition.unit) if flops and medians else []
    for line in [*floors, *competition.notes, closing_line(loads, arguments.most_disturbed)]:
        print(line)
    path = Path(arguments.folder) / f"{arguments.name}_{arguments.shape}_{arguments.dtype}.json"
    rates = {name: [run.rates for run in many] for name, many in runs.items()}
    shares = {name: [run.load and run.load._asdict() for run in many] for name, many in runs.items()}
    result = {"medians": medians, "peak_bytes": peaks, "rates": rates, "loads": shares, "undisturbed_rounds": quoted}
    path.write_text(json.dumps({**result, "settings": vars(arguments), "notes": competition.notes}, indent=2))


def _matmul_rate(arguments: argparse.Namespace) -> float:
    """FLOPs a second of a plain matmul in the competitors' precision and threads, as Threestep multiplies."""
    import torch

    from training.utils.engine.ranks.devices import backend_of, measured_matmul_rate

    torch.set_num_threads(arguments.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with backend_of({}, device).held():
        return measured_matmul_rate(dtype, device, seconds=2.0)


def _table(unit: str, runs: dict[str, list[Measured]], peaks: dict[str, int]) -> list[str]:
    """Table lines: medians over all steps, the first one's over each, and in brackets the least and the most that this
    ratio was in a round; the largest load of a run."""
    medians = {name: statistics.median(rate for run in many for rate in run.rates) for name, many in runs.items()}
    first = next(iter(runs))
    lines = [f"| competitor | median {unit}/s | {first} / competitor | peak memory | others and steal |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, many in runs.items():
        pairs = zip(runs[first], many, strict=True)
        ratios = [statistics.median(ours.rates) / statistics.median(run.rates) for ours, run in pairs]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 and name != first else ""
        known = [run.load for run in many if run.load]
        load = f"at most {100 * max(load.others + load.stolen for load in known):.1f} %" if known else "not known"
        cells = (_figure(medians[name]), f"{medians[first] / medians[name]:.2f}{spread}", f"{peaks[name] / 1e9:.2f} GB")
        lines.append(f"| {' | '.join((name, *cells, load))} |")
    return lines


if __name__ == "__main__":
    main()
