"""Runs whose disk refuses one write, or all from one on: each ends with its model or a checkpoint, or before it trains.

    python -m tests.refused_writes                                 every call of each program, once and for ever
    python -m tests.refused_writes --programs sft --every 10       every tenth call of one program
    python -m tests.refused_writes --programs ppo --at summary     the first call for each file with such a name
    python -m tests.refused_writes --ranks 2 --rank 1              two ranks, and the disk of the second refuses

A call is one of the C library's that changes what lies below the output folder or the cache (tests/support/
refusing_disk). One run counts them, and then one run for each of them has it refused: with EIO, once, and with ENOSPC,
that call and all later ones.

Thinned, but with --all: of calls that stand in one loop (the lines of TensorBoard's file, the tensors of torch.save)
the first two, the middle one and the last two of each kind are refused; and a disk is full from the first call for each
file on, not also from the second (a write follows each open). tests/end_to_end/test_sweeps.py runs a short
form. One line a program is printed: calls of an unbroken run, calls refused, runs, and what became of these.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked_runs import MODULES, Ended, Files, import_everything, make_files, run, start_flags
from tests.support.refusing_disk import Refusal, preloaded, refuse, why_not

_COUNTED_ALONE = Refusal(0, 0)
# Calls of one loop: (name of the file, call).
_LOOPS = (re.compile(r"events\.out\.tfevents"), re.compile(r"_states\.pt$"))


@dataclass(frozen=True)
class Place:
    """Where a trial lies. disk: what refuses. rescue: another disk."""

    root: Path

    @property
    def disk(self) -> Path:
        return self.root / "disk"

    @property
    def rescue(self) -> Path:
        return self.root / "rescue"

    @property
    def run(self) -> Path:
        return self.disk / "run"

    @property
    def journal(self) -> Path:
        return self.root / "calls.txt"


def flags_of(program: str, files: Files, place: Place, steps: int = 2) -> list[str]:
    """A run of two steps with a checkpoint after the first, an evaluation and samples."""
    shared = (
        f"{start_flags(program, files)} --eval_fraction 0.1 --report_mfu false --max_train_steps {steps} "
        "--save_every 1 --num_train_epochs 100 --dtype fp32 --wait_for_disk_seconds 0 "
        f"--rescue_dir {place.rescue} --output_dir {place.run} --data_output_path {place.disk / 'cache'}"
    )
    if program == "ppo":
        own = (
            "--enable_ema --per_device_generation_batch_size 2 --per_device_training_batch_size 2 "
            "--max_answer_seq_len 4"
        )
    elif program.startswith("acting"):
        own = (
            "--num_samples_per_prompt 2 --per_device_generation_batch_size 2 --per_device_training_batch_size 4 "
            "--max_answer_seq_len 24"
        )
        own += " --mtp_num_layers 1 --speculate 1" if program == "acting_mtp" else ""
    else:
        own = "--max_seq_len 80 --per_device_train_batch_size 2 --learning_rate 1e-3"
    return [*shared.split(), *own.split()]


def tried(program: str, files: Files, root: Path, refusal: Refusal, asked: argparse.Namespace) -> tuple[Ended, Place]:
    place = Place(root)
    place.disk.mkdir(parents=True)
    place.rescue.mkdir()
    log = (place.disk if asked.log_on_disk else root) / "log.txt"

    def prepare(rank: int) -> None:
        if rank == asked.rank:
            refuse([place.disk], refusal, place.journal)

    flags = flags_of(program, files, place)
    return run(program, asked.ranks, flags, log, None, 0, prepare), place


# What a run may end as.


def outcome(ended: Ended, place: Place, whole: dict[str, dict[str, Any]], has_log: bool) -> tuple[str, list[str]]:
    """How it ended, in a few words, and what is wrong with that. whole: the tensors of an unbroken run's models.
    has_log: False where the log too was on the disk that refuses."""
    problems = []
    if "Traceback" in ended.said or "Logging error" in ended.said or "Exception ignored" in ended.said:
        problems.append("a traceback")
    if any(code < 0 or code > 2 for code in ended.codes):
        problems.append(f"codes {ended.codes}")
    found = {name: _where(name, place) for name in whole}
    wrong = [name for name, folder in found.items() if folder is not None and not _same(folder, whole[name])]
    if wrong:
        problems.append(f"other weights in {' and '.join(wrong)}")
    trained = bool(ended.parts.get("update"))
    has_all = all(folder is not None for folder in found.values())
    if has_all and all(folder and folder.is_relative_to(place.run) for folder in found.values()):
        if any(ended.codes):
            problems.append(f"codes {ended.codes}, with its models")
        return "saved", problems
    if not any(ended.codes):
        problems.append("code 0 without its models")
    if has_log and "error: " not in ended.said:
        problems.append("no sentence")
    if has_all:
        return "rescued", problems
    if not trained:
        return "ended before training", problems
    problems.append("trained, and its models are nowhere")
    return "lost", problems


def _where(name: str, place: Place) -> Path | None:
    folders = [place.run / name, *place.rescue.glob(f"*/{name}")]
    return next((folder for folder in folders if (folder / "model.safetensors").is_file()), None)


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _same(folder: Path, whole: dict[str, Any]) -> bool:
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json")
    if not all((folder / name).is_file() and (folder / name).stat().st_size for name in needed):
        return False
    mine = tensors_of(folder)
    return mine.keys() == whole.keys() and all(mine[name].equal(whole[name]) for name in mine)


# Which calls are refused.


def calls_in(journal: Path) -> list[tuple[str, str]]:
    """(call, path) of each, in their order; from 1 on they are numbered so."""
    return [(line.split(" ", 2)[1], line.split(" ", 2)[2]) for line in journal.read_text().splitlines()]


def thinned(calls: Sequence[tuple[str, str]]) -> list[int]:
    """The numbers of the calls to refuse: all, but of those in one loop the first two, the middle one and the last
    two."""
    loops = defaultdict(list)
    chosen = []
    for number, (what, path) in enumerate(calls, start=1):
        if any(loop.search(path) for loop in _LOOPS) and what in ("write", "writev", "open64", "close"):
            loops[what, path].append(number)
        else:
            chosen.append(number)
    for numbers in loops.values():
        chosen += {*numbers[:2], numbers[len(numbers) // 2], *numbers[-2:]}
    return sorted(chosen)


def swept(program: str, files: Files, root: Path, asked: argparse.Namespace) -> bool:
    """Print a line for each thing that is wrong, and one that counts; return whether nothing was."""
    started = time.monotonic()
    ended, place = tried(program, files, root / program, _COUNTED_ALONE, asked)
    if any(ended.codes):
        print(f"{program}: the unbroken run ended with {ended.codes}: {ended.said[-2000:]}")
        return False
    whole = {folder.parent.name: tensors_of(folder.parent) for folder in place.run.glob("*/model.safetensors")}
    calls = calls_in(place.journal)
    chosen = list(range(1, len(calls) + 1)) if asked.all else thinned(calls)
    if asked.at:
        found = {pattern: [n for n in chosen if re.search(pattern, calls[n - 1][1])] for pattern in asked.at}
        lacking = [pattern for pattern, numbers in found.items() if not numbers]
        if lacking:
            print(f"{program}: no call for {' and '.join(lacking)}")
            return False
        chosen = sorted({numbers[0] for numbers in found.values()})
    chosen = chosen[asked.first :: asked.every]
    counts: Counter[str] = Counter()
    runs = 0
    is_fine = True
    kinds = [(errno.EIO, False), (errno.ENOSPC, True)]
    firsts = {path: number for number, (_, path) in reversed([*enumerate(calls, start=1)])}
    for number in chosen:
        for kind, stays in kinds:
            if stays and not asked.all and firsts[calls[number - 1][1]] != number:
                continue
            refusal = Refusal(number, kind, stays)
            runs += 1
            ended, place = tried(program, files, root / "trial", refusal, asked)
            if not any(line.endswith("REFUSED") for line in place.journal.read_text().splitlines()):
                counts[f"{os.strerror(kind)}: not reached"] += 1
                shutil.rmtree(root / "trial")
                continue
            how, problems = outcome(ended, place, whole, not asked.log_on_disk)
            counts[f"{os.strerror(kind)}: {how}"] += 1
            if problems:
                is_fine = False
                counts[f"{os.strerror(kind)}: WRONG"] += 1
                what, path = calls[number - 1]
                where = path.replace(str(root / program), "")
                print(f"{program} {refusal} ({what} {where}): {'; '.join(problems)}", flush=True)
                if asked.show:
                    print(ended.said[-asked.show :], flush=True)
            shutil.rmtree(root / "trial")
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    seconds = time.monotonic() - started
    ranks = f", {asked.ranks} ranks" if asked.ranks > 1 else ""
    print(f"| {program}{ranks} | {len(calls)} | {len(chosen)} | {runs} | {told} | {seconds:.0f} s |", flush=True)
    return is_fine


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="the one whose disk refuses")
    parser.add_argument("--at", nargs="+", default=[], help="patterns of paths")
    parser.add_argument("--every", type=int, default=1, help="of the calls, every so many")
    parser.add_argument("--first", type=int, default=0, help="how many calls to leave out at the beginning")
    parser.add_argument("--all", action="store_true", help="no call of a loop is left out")
    parser.add_argument("--log_on_disk", action="store_true", help="the log too is on the disk that refuses")
    parser.add_argument("--show", type=int, default=0, help="so many characters of the log of each that is wrong")
    asked = parser.parse_args(argv)
    if reason := why_not():
        print(reason)
        return 3
    if "LD_PRELOAD" not in os.environ:  # which a process must be started with
        return subprocess.run([sys.executable, "-m", "tests.refused_writes", *argv], env=preloaded()).returncode
    import_everything()
    with tempfile.TemporaryDirectory(prefix="refused_writes_") as temporary:
        files = make_files(Path(temporary), rows=24)
        sweep = partial(swept, files=files, root=Path(temporary), asked=asked)
        return int(not all([sweep(program) for program in asked.programs]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
