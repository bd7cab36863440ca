"""The code that one follows from a step's `main` on: `python -m tests.support.reading_path [CHECKOUT]`.

Each step is run once on a tiny model with a profile hook. Whole functions of `training/` that are called count, from
decorators to end; plugins do not, nor what a plugin calls, nor third parties. The loop is what is called while the
trainer's `train` runs.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SHORT = "--max_eval_rows 2 --eval_interval 0 --dtype fp32 --max_train_steps 1"
OF_ROWS = "--per_device_train_batch_size 2 --max_seq_len 48"
STEPS = {
    **dict.fromkeys(("step1_sft", "step2_reward", "step2_dpo"), f"--model_name_or_path START {SHORT} {OF_ROWS}"),
    "step3_ppo": f"--actor_model_name_or_path START --critic_model_name_or_path step2_reward/model {SHORT} "
    "--per_device_generation_batch_size 2 --max_answer_seq_len 4 --max_prompt_seq_len 40",
}


class Followed(NamedTuple):
    lines: int
    files: int


def followed(
    place: Path, run: Callable[[list[str], dict[str, str], Path], Any], checkout: Path = Path()
) -> dict[str, dict[str, Followed]]:
    """Run each step in the folder `place`, which has a model folder START and pairs.jsonl; return for each the whole
    program and its loop. run: a file with its arguments, an environment, a folder -> as subprocess.run does"""
    found = {}
    environment = {
        **os.environ, "PYTHONPATH": str(checkout.resolve()), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for step, flags in STEPS.items():
        data = f"--data_path jsonl:pairs.jsonl --data_output_path cache --output_dir {step}"
        words = [str(Path(__file__).resolve()), str(checkout.resolve()), step, *flags.split(), *data.split()]
        done = run(words, environment, place)
        assert done.returncode == 0, done.stderr
        told = json.loads((place / f"{step}.json").read_text())
        found[step] = {part: Followed(*numbers) for part, numbers in told.items()}
    return found


def run_and_count(package: Path, step: str, argv: list[str]) -> dict[str, tuple[int, int]]:
    """Run a step's main in this process; return lines and files of the whole program, and of its loop."""
    called: dict[str, set[tuple[str, int]]] = {"program": set(), "loop": set()}
    trainer, main_file = str(package / step / "trainer.py"), str(package / step / "main.py")
    plugins = str(package.parent / "threestep" / "plugins")
    open_loops = open_modules = open_plugins = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal open_loops, open_modules, open_plugins
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith((str(package), plugins)):
            return
        way = 1 if event == "call" else -1
        is_plugin = code.co_filename.startswith(plugins)
        open_plugins += is_plugin * way
        if open_plugins or is_plugin:
            return
        if code.co_name == "<module>" and code.co_filename != main_file:
            open_modules += way
        if open_modules:  # what an import calls is no part of the run
            return
        is_loop = code.co_filename == trainer and code.co_name == "train"
        open_loops += is_loop * way
        for part in ("program", *(["loop"] if open_loops or is_loop else [])):
            called[part].add((code.co_filename, code.co_firstlineno))

    sys.argv = [step, *argv]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        runpy.run_module(f"training.{step}.main", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    return {part: _counted(functions) for part, functions in called.items()}


def _counted(called: set[tuple[str, int]]) -> tuple[int, int]:
    lines = set()
    for file in {file for file, _ in called}:
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (file, first) in called:
                    lines |= {(file, line) for line in range(first, (node.end_lineno or first) + 1)}
    return len(lines), len({file for file, _ in lines})


def make_start(place: Path) -> None:
    """Write what `followed` reads into `place`."""
    from tests.end_to_end.conftest import pair_rows, save_start

    save_start(place / "START")
    rows = "".join(json.dumps(row) + "\n" for row in pair_rows(40))
    (place / "pairs.jsonl").write_text(rows, encoding="utf-8")


def _run(words: list[str], environment: dict[str, str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environment, cwd=place, capture_output=True, text=True)


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with tempfile.TemporaryDirectory() as folder:
        make_start(Path(folder))
        print("| step | whole run: lines, files | the loop: lines, files |\n| --- | --- | --- |")
        for step, parts in followed(Path(folder), _run, checkout).items():
            program, loop = parts["program"], parts["loop"]
            print(f"| {step} | {program.lines}, {program.files} | {loop.lines}, {loop.files} |")


if __name__ == "__main__":
    if len(sys.argv) > 2:  # a step's process
        where, step_run, *flags_of_step = sys.argv[1:]
        sys.path[0] = where
        told_of_step = run_and_count(Path(where, "training"), step_run, flags_of_step)
        Path(f"{step_run}.json").write_text(json.dumps(told_of_step), encoding="utf-8")
    else:
        main()
