"""Does memory stay constant? Step 3 with responses of random lengths, and each rank's resident memory at each step.

    python -m benchmarks.steady_memory [--steps 200] [--ranks 2] [--folder runs/steady_memory] [-- MORE FLAGS OF STEP 3]

A small Llama shape with random weights (1.1 million), four models under ZeRO-3, 8 responses a prompt, the embedded
task. A stop string ends a response as soon as a token with that text is drawn, so lengths vary over the whole range.
Prints each rank's memory as step 20 and the last step began, and their ratio; writes memory.json. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.curve import NEW_MODEL
from benchmarks.rollout_engines import MEMORY_FOLDER, memory_file
from benchmarks.workload import save_scalar_model
from training.utils.run.launch import launch

ROOT = Path(__file__).parents[1]
FIRST = 20
STEP_3 = (
    "--data_path embedded --seed 1 --data_split 10,12,3 --max_prompt_seq_len 32 --max_eval_rows 8 --dtype fp32 "
    "--actor_zero_stage 3 --critic_zero_stage 3 --num_samples_per_prompt 8 --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 16 --max_answer_seq_len 64 --stop w --num_train_epochs 100"
).split()


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/steady_memory")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="flags of step 3, after --")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).resolve()
    actor, critic = _models(folder)
    places = ["--actor_model_name_or_path", str(actor), "--critic_model_name_or_path", str(critic)]
    places += ["--rollout_engine", f"{ROOT}/benchmarks/rollout_engines.py:WatchedRollout"]
    places += ["--output_dir", str(folder / "run"), "--data_output_path", str(folder / "cache"), "--overwrite"]
    flags = [*STEP_3, *places, "--max_train_steps", str(arguments.steps), *arguments.flags]
    os.environ[MEMORY_FOLDER] = str(folder / "run")
    code = launch("training.step3_ppo.main", flags, arguments.ranks)
    memory = [read_memory(memory_file(folder / "run", rank)) for rank in range(arguments.ranks)]
    (folder / "memory.json").write_text(json.dumps({"bytes_after_step": memory, "exit_code": code}))
    print(f"ended with code {code}")
    for rank, found in enumerate(memory):
        print(summary(rank, found))
    sys.exit(code)


def summary(rank: int, after_step: list[list[int]]) -> str:
    """One line. after_step[k]: bytes after k steps, all and the anonymous part; 0 are those before training.
    Compared is what was held as step 20 and the last step began: freed pages go back after every tenth step."""
    last = len(after_step) - 1
    first = min(FIRST, last)
    parts = []
    pairs = zip(("resident", "of it anonymous"), after_step[first - 1], after_step[last - 1], strict=True)
    for name, begin, end in pairs:
        parts.append(f"{name} {begin / 1e6:.1f} -> {end / 1e6:.1f} MB, {end / begin:.4f}")
    return f"rank {rank}, as step {first} -> {last} began: {'; '.join(parts)}"


def read_memory(file: Path) -> list[list[int]]:
    """What was held as step k + 1, or the evaluation after the last step, began: after k steps."""
    return [[int(number) for number in line.split()] for line in file.read_text().splitlines()][1:]


def _models(folder: Path) -> tuple[Path, Path]:
    actor, critic = folder / "model", folder / "reward_model"
    command = [
        sys.executable,
        "-m",
        "threestep.plugins.programs.new_model",
        *NEW_MODEL,
        "--num_hidden_layers",
        "2",
        "--out",
        str(actor),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    save_scalar_model(actor, critic)
    return actor, critic


if __name__ == "__main__":
    main()
