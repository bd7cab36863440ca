"""Makes a model folder of a checkpoint, as the end of the run would have: safetensors, configuration, tokenizer.

    python -m training.export runs/ppo/checkpoints/step_000200 my_model
    python -m training.export runs/ppo my_model             # the run's latest checkpoint that is whole
    python -m training.export runs/ppo my_critic --part critic

One process, no ranks, no GPU; any ZeRO stage and any number of ranks. Every byte is compared with the checkpoint's
manifest first. LoRA is merged, or kept apart with --keep_lora: OUT is then the model without it, OUT/adapter PEFT's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from training.utils.run.errors import ThreestepError
from training.utils.run.program import run_program

PARTS = ("model", "critic", "average")


def main(argv: Sequence[str]) -> None:
    """Parse, find the checkpoint, check it, write the folder."""
    arguments = _parsed(argv)
    checkpoint = chosen_checkpoint(Path(arguments.checkpoint))
    out = Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ThreestepError(f"OUT: '{out}' exists and is not empty; remove it, or name another folder")

    from training.utils.engine.export import described_engines, export_model

    name = engine_of(arguments.part, described_engines(checkpoint), checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    export_model(checkpoint, name, out, of_average=arguments.part == "average", keep_lora=arguments.keep_lora)
    apart = f", its LoRA adapters in {out / 'adapter'}" if arguments.keep_lora else ""
    print(f"{arguments.part} of {checkpoint} is in {out}{apart}")


def chosen_checkpoint(path: Path) -> Path:
    """The checkpoint of that path, or the latest whole one of the run there. ThreestepError where there is none."""
    from training.utils.run.checkpoints import MANIFEST, CheckpointFolder, damage

    if (path / MANIFEST).is_file() or path.name.startswith("step_"):
        problem = damage(path) if path.is_dir() else "there is no such folder"
        if problem is not None:
            raise ThreestepError(f"CHECKPOINT: {path}: {problem}; give another checkpoint, or the run's folder")
        return path
    folder = CheckpointFolder(path.parent if path.name == "checkpoints" else path)
    problems = []
    for found in folder.latest_first():
        problem = damage(found)
        if problem is None:
            return found
        problems.append(f"{found.name}: {problem}")
        print(f"warning: passed over {found}: {problem}", file=sys.stderr)
    what = f"none is whole ({'; '.join(problems)})" if problems else "there is none"
    raise ThreestepError(
        f"CHECKPOINT expects a folder such as RUN/checkpoints/step_000100, or RUN, got '{path}', and of checkpoints "
        f"in {folder.path} {what}; --save_every writes them"
    )


def engine_of(part: str, engines: Sequence[str], checkpoint: Path) -> str:
    """The engine that --part is of: steps 1 and 2 call theirs model, step 3 actor and critic."""
    if not engines:
        raise ThreestepError(
            f"{checkpoint} holds no models/ with configuration and tokenizer: an earlier Threestep wrote it; --resume "
            "the run with --save_at_end, and export what that writes"
        )
    wanted = ("critic",) if part == "critic" else ("model", "actor")
    for name in wanted:
        if name in engines:
            return name
    raise ThreestepError(f"--part {part}: {checkpoint} holds {' and '.join(engines)}, and no {wanted[0]}")


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ThreestepError(f"in the command line: {message}; --help says what is expected")

    parser = Parser(
        prog="python -m training.export",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="RUN/checkpoints/step_NNNNNN, or RUN for its latest")
    parser.add_argument("out", metavar="OUT", help="model folder to write; new, or empty")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="model",
        help="model (step 3: the actor), critic, or average: the actor's moving average of --enable_ema",
    )
    parser.add_argument("--keep_lora", action="store_true", help="do not merge LoRA: OUT/adapter is PEFT's folder")
    return parser.parse_args(list(argv))


if __name__ == "__main__":
    # transformers loads deepspeed where it is installed, which then looks for a device; nothing here runs on one.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_program(main)
