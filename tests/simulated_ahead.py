"""The simulation of `benchmarks.rollouts_ahead` beside real runs of step 3 by two servers.

    python -m tests.simulated_ahead [--steps 16] [--slots 4] [--mean 0.4]

The servers are the tests' own: each draws so many responses at a time, and a response takes a time of an exponential
distribution, a function of its prompt and seed. A reward that sleeps makes a step of training take about as long as its
responses. A run with K = 0 gives the seconds of a step of training; the others are simulated with them and with the
servers' own distribution, and compared with what they took. Mean of ten simulations.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.forked_runs import Files, import_everything, make_files, run
from threestep.plugins.vllm.tests.rollout_server_processes import Disturbance, server_processes

PROMPTS, SAMPLES, SERVERS = 16, 2, 2
_REWARD = """
import time

def slow(prompts, responses, **columns):
    time.sleep(SECONDS)
    return [len(text) / 10 for text in responses]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4, help="responses that a server draws at a time")
    parser.add_argument("--mean", type=float, default=0.4, help="seconds of a response")
    asked = parser.parse_args()
    import_everything()
    with tempfile.TemporaryDirectory(prefix="simulated_ahead_") as place:
        folder = Path(place)
        files = make_files(folder, rows=3336)
        training = PROMPTS * SAMPLES * asked.mean / (SERVERS * asked.slots)
        (folder / "slow.py").write_text(f"SECONDS = {training}\n{_REWARD}")
        timing = Disturbance(folder / "never", mean_seconds=asked.mean, slots=asked.slots)
        with server_processes(folder / "servers.txt", timing):
            seconds = {ahead: _measured(ahead, files, folder, asked.steps) for ahead in ("0", "1", "2", "free")}
    print(_table(seconds, asked))


def _measured(ahead: str, files: Files, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Make a run; return the lines of its log."""
    out = folder / f"ahead_{ahead}"
    words = (
        f"--data_path jsonl:{files.pairs} --data_split 2,2,2 --max_eval_rows 8 --max_prompt_seq_len 64 "
        f"--max_train_steps {steps} --num_train_epochs 100 --dtype fp32 --actor_model_name_or_path {files.start} "
        f"--advantage grpo --kl_coef 0 --num_samples_per_prompt {SAMPLES} --per_device_generation_batch_size {PROMPTS} "
        f"--per_device_training_batch_size {PROMPTS * SAMPLES} --max_answer_seq_len 6 --actor_learning_rate 1e-3 "
        f"--reward {folder}/slow.py:slow --rollout_engine vllm_server --vllm_servers @{folder}/servers.txt "
        f"--rollouts_ahead {ahead} --output_dir {out} --data_output_path {folder}/cache_{ahead} --report false"
    )
    ended = run("servers", 1, words.split(), folder / f"{ahead}.txt")
    if any(ended.codes):
        raise SystemExit(ended.said[-3000:])
    return [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]


def _table(seconds: dict[str, list[dict[str, Any]]], asked: argparse.Namespace) -> str:
    from benchmarks.rollouts_ahead import Simulated, simulated, simulated_held

    shape, slots, steps = (SERVERS, asked.slots), SERVERS * asked.slots, asked.steps

    def lengths(seed: int) -> list[list[float]]:
        dice = random.Random(seed)
        return [[dice.expovariate(1 / asked.mean) for _ in range(PROMPTS * SAMPLES)] for _ in range(steps)]

    def predicted(simulate: Callable[[list[list[float]], float], Simulated], training: float) -> float:
        return statistics.mean(training / simulate(lengths(seed), training).rate for seed in range(10))

    def a_step(lines: list[dict[str, Any]]) -> float:
        ends = [line["trained"] for line in lines if "rows" in line]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    drawn = predicted(lambda each, training: simulated(0, each, shape, training, together=True), 1e-9)
    training = a_step(seconds["0"]) - drawn
    table = ["| K | measured seconds a step | simulated | ratio |", "| --- | --- | --- | --- |"]
    for ahead, lines in seconds.items():
        if ahead == "free":
            found = predicted(lambda each, own: simulated_held(2, each, slots, own, group=SAMPLES), training)
        else:
            found = predicted(lambda each, own, k=int(ahead): simulated(k, each, shape, own, together=True), training)
        measured = a_step(lines)
        table.append(f"| {ahead} | {measured:.2f} | {found:.2f} | {found / measured:.2f} |")
    return "\n".join([f"training takes {training:.2f} s a step, drawing {drawn:.2f} s", *table])


if __name__ == "__main__":
    main()
