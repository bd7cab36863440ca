"""Writes a checkpoint as a model folder, as at the end of its run: safetensors, configuration, tokenizer.

    threestep export runs/ppo/checkpoints/step_000200 my_model
    threestep export runs/ppo my_model             # the run's latest undamaged checkpoint
    threestep export runs/ppo my_critic --part critic

Needs one process and no GPU, for any ZeRO stage and number of ranks. Every byte is checked against the
checkpoint's manifest first. LoRA is merged; with --keep_lora, OUT is the base model and OUT/adapter the PEFT adapter.
With --mtp ENGINE, OUT is written so that this engine drafts with the trained MTP head.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.flags.arguments import ProgramParser
from training.utils.generation.table import ENGINES
from training.utils.plugins.registry import hooks, owner_sentence
from training.utils.run.program import run_program
from training.utils.run.run_folder import check_place

PARTS = ("model", "critic", "average")


def main(argv: Sequence[str]) -> None:
    """Parse, find the checkpoint, check it, write the folder."""
    arguments = _parse(argv)
    run, out = Path(arguments.checkpoint), Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ThreestepError(f"OUT must be a new or empty folder, got '{out}'; remove it, or choose another")
    check_place("OUT", out, is_folder=True)
    if arguments.part == "model" and not arguments.keep_lora and is_finished_without_checkpoints(run):
        shutil.copytree(run / "model", out, dirs_exist_ok=True)
        print(f"{run} has no checkpoints (--save_every, --save_at_end); copied its finished model to {out}")
        write_head_for(arguments.mtp, out)
        return
    checkpoint = find_checkpoint(run)

    from threestep.plugins.programs.exporting import described_engines, export_model
    from training.utils.checkpoints.folder import stranger
    from training.utils.plugins.plugin import ExportedModel

    if (problem := stranger(checkpoint)) is not None:
        raise ThreestepError(f"CHECKPOINT: {checkpoint}: {problem}")
    name = engine_of(arguments.part, described_engines(checkpoint), checkpoint)
    export_model(
        checkpoint,
        name,
        out,
        of_average=arguments.part == "average",
        keep_lora=arguments.keep_lora,
        write_beside=hooks("exported"),
    )
    exported = ExportedModel(checkpoint.parent.parent, checkpoint.name, arguments.part, out)
    for at_export in hooks("at_export"):
        at_export(exported)
    apart = f", and its LoRA adapters are in {out / 'adapter'}" if arguments.keep_lora else ""
    print(f"{arguments.part} of {checkpoint} is in {out}{apart}")
    write_head_for(arguments.mtp, out)


WITH_HEAD_WRITERS = [name for name, entry in ENGINES.items() if entry.head_writer is not None]


def head_writer_of(given: str) -> Callable[[Path], str]:
    """Return an engine's `head_writer`; ThreestepError for the name of an engine without one."""
    place = ENGINES[given].head_writer if given in ENGINES else None
    if place is None:
        raise ThreestepError(
            f"--mtp expects {' or '.join(WITH_HEAD_WRITERS) or 'an engine that drafts with a head'}, got "
            f"'{given}'{owner_sentence('rollout_engines', given)}"
        )
    return named_object(place)


def write_head_for(engine: str | None, out: Path) -> None:
    """Write the head of the model in `out` as --mtp asks for; `out` is removed if that cannot be done."""
    if engine is None:
        return
    try:
        told = head_writer_of(engine)(out)
    except ThreestepError:
        shutil.rmtree(out)
        raise
    print(told)


def is_finished_without_checkpoints(run: Path) -> bool:
    """True if a run left its model and no checkpoint, as one with the default flags does."""
    return (run / "summary.json").is_file() and (run / "model").is_dir() and not (run / "checkpoints").exists()


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the latest undamaged one of the run there. ThreestepError if there is none."""
    from training.utils.checkpoints.folder import MANIFEST, CheckpointFolder, damage

    if (path / MANIFEST).is_file() or path.name.startswith("step_"):
        problem = damage(path) if path.is_dir() else "the folder does not exist"
        if problem is not None:
            raise ThreestepError(f"CHECKPOINT: {path}: {problem}; pass another checkpoint, or the run's folder")
        return path
    folder = CheckpointFolder(path.parent if path.name == "checkpoints" else path)
    latest, problems = folder.latest_undamaged()
    for problem in problems:
        print(f"warning: skipped {problem}", file=sys.stderr)
    if latest is None:
        damaged = f"only damaged checkpoints ({'; '.join(problems)})" if problems else "no checkpoints"
        raise ThreestepError(
            f"CHECKPOINT expects a folder such as RUN/checkpoints/step_000100, or RUN, but '{path}' has {damaged} in "
            f"{folder.path}; save some with --save_every, or pass another folder"
        )
    return latest


def engine_of(part: str, engines: Sequence[str], checkpoint: Path) -> str:
    """The engine that --part names: steps 1 and 2 call theirs model, step 3 actor and critic."""
    if not engines:
        raise ThreestepError(
            f"{checkpoint} has no models/ folder with the configuration and tokenizer, because an older version of "
            "Threestep wrote it; resume the run with --save_at_end, and export the new checkpoint"
        )
    wanted = ("critic",) if part == "critic" else ("model", "actor")
    for name in wanted:
        if name in engines:
            return name
    raise ThreestepError(
        f"--part {part} needs a checkpoint with a {wanted[0]}, but this one has only {' and '.join(engines)}; choose "
        "another --part"
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("threestep.plugins.programs.export", __doc__ or "")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="RUN/checkpoints/step_NNNNNN, or RUN for its latest")
    parser.add_argument("out", metavar="OUT", help="model folder to write; must be new or empty")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="model",
        help="model (step 3: the actor), critic, or average (the actor's moving average from --enable_ema)",
    )
    parser.add_argument(
        "--keep_lora", action="store_true", help=("do not merge LoRA adapters; write them to OUT/adapter for PEFT")
    )
    parser.add_argument(
        "--mtp",
        metavar="ENGINE",
        help=(
            "write the multi-token-prediction head in the form that this engine reads "
            f"({', '.join(WITH_HEAD_WRITERS) or 'there is none'}; threestep/plugins/mtp/README.md)"
        ),
    )
    arguments = parser.parse(argv)
    if arguments.mtp:
        head_writer_of(arguments.mtp)
    if arguments.mtp and (arguments.keep_lora or arguments.part != "model"):
        raise ThreestepError("--mtp needs the merged model; remove --keep_lora and --part, or remove --mtp")
    return arguments


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
