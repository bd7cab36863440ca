"""One command, one table of ratios.

    python -m benchmarks sft --data_dir ../shared/data/gsm8k [--shape 25m] [--dtype fp32] [--rounds 3] [--steps 10]
    python -m benchmarks reward --data_dir ...

Competitors take turns (A B C, A B C, ...), so that a machine whose speed drifts slows all of them; each figure is a
median over all steady steps, and only ratios are claims. TRL runs in an environment of its own, made on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.workload import SHAPES, Workload, make_workload

TRL = "trl==1.16.0"
ROOT = Path(__file__).parents[1]
# The first steps of a process warm caches and allocators up.
WARM_UP_STEPS = 2


def main() -> None:
    """Run the rounds, print the table, write JSON."""
    arguments = _arguments()
    workload = make_workload(Path(arguments.folder), arguments.shape, Path(arguments.data_dir))
    commands = {"sft": _sft, "reward": _reward}[arguments.name](workload, arguments)
    rates: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(arguments.rounds):
        for name, command in commands.items():
            measured = _run(command, arguments.threads)
            rates[name] += measured
            print(f"round {turn + 1}: {name}: {statistics.median(measured):,.1f}", file=sys.stderr, flush=True)
    _report(arguments, rates)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("sft", "reward"))
    parser.add_argument("--data_dir", required=True, help="GSM8K's files as published")
    parser.add_argument("--shape", default="25m", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", default="runs/benchmarks")
    parser.add_argument("--without_trl", action="store_true")
    return parser.parse_args()


def _sft(workload: Workload, arguments: argparse.Namespace) -> dict[str, list[str]]:
    floor = [sys.executable, "-m", "benchmarks.competitors.floor_sft", "--workload", str(workload.folder)]
    common = ["--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    flags = ["--data_path", f"jsonl:{workload.sft}", "--data_split", "1,0,0", "--learning_rate", "1e-5"]
    # The floor's step is 4,096 tokens; GSM8K's rows average 163, so 25 of them are as many.
    size = ["--per_device_train_batch_size", "25"]
    commands = {
        "Threestep": _threestep("step1_sft", "tokens", workload, arguments, [*flags, *size]),
        "bare loop, loss on every token": [*floor, *common],
        "bare loop, the same logits only": [*floor, *common, "--head", "chosen"],
    }
    if not arguments.without_trl:
        for mode in ("plain", "padding_free", "grouped"):
            commands[f"TRL, {mode}"] = _trl("sft", workload, arguments, ["--mode", mode])
    return commands


def _reward(workload: Workload, arguments: argparse.Namespace) -> dict[str, list[str]]:
    flags = ["--data_path", f"jsonl:{workload.pairs}", "--data_split", "0,1,0", "--learning_rate", "1e-5"]
    size = ["--per_device_train_batch_size", "8"]
    commands = {
        "Threestep": _threestep("step2_reward", "pairs", workload, arguments, [*flags, *size]),
        "Threestep, padded": _threestep("step2_reward", "pairs", workload, arguments, [*flags, *size, "--padded"]),
    }
    if not arguments.without_trl:
        commands["TRL"] = _trl("reward", workload, arguments, [])
    return commands


def _threestep(step: str, unit: str, workload: Workload, arguments: argparse.Namespace, flags: list[str]) -> list[str]:
    output = str(workload.folder / f"{step}_run")
    program = [sys.executable, "-m", "benchmarks.competitors.threestep", "--step", step, "--unit", unit]
    shared = ["--model_name_or_path", str(workload.model), "--dtype", arguments.dtype, "--zero_stage", "1"]
    shared += ["--max_train_steps", str(arguments.steps), "--max_eval_rows", "8", "--max_seq_len", "512"]
    shared += ["--data_output_path", str(workload.folder / "cache")]
    return [*program, "--output_dir", output, "--", *shared, *flags]


def _trl(trainer: str, workload: Workload, arguments: argparse.Namespace, flags: list[str]) -> list[str]:
    python = _trl_python(Path(arguments.folder) / "trl_venv")
    program = str(ROOT / "benchmarks" / "competitors" / "trl_peer.py")
    common = ["--workload", str(workload.folder), "--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    return [python, program, "--trainer", trainer, *common, *flags]


def _trl_python(folder: Path) -> str:
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        pins = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pins, "torch==2.13.0"], check=True)
        subprocess.run([*pins, TRL, "datasets", "accelerate"], check=True)
        (folder / "done").touch()
    return str(python)


def _run(command: list[str], threads: int) -> list[float]:
    """Return units a second of each steady step."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [step["units"] / step["seconds"] for step in steps[WARM_UP_STEPS:]]


def _report(arguments: argparse.Namespace, rates: dict[str, list[float]]) -> None:
    unit = "tokens/s" if arguments.name == "sft" else "pairs/s"
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ours = medians["Threestep"]
    settings = (arguments.shape, arguments.dtype, f"{arguments.threads} threads", f"{arguments.rounds} rounds")
    print(", ".join((arguments.name, *settings)))
    print(f"| competitor | median {unit} | Threestep / competitor |")
    print("| --- | --- | --- |")
    for name, median in medians.items():
        print(f"| {name} | {median:,.1f} | {ours / median:.2f} |")
    path = Path(arguments.folder) / f"{arguments.name}_{arguments.shape}_{arguments.dtype}.json"
    path.write_text(json.dumps({"medians": medians, "rates": rates, "settings": vars(arguments)}, indent=2))


if __name__ == "__main__":
    main()
