"""One command for the first hours on a GPU: what no CPU can show, in nine parts.

    python -m benchmarks.gpu_day [PART ...] --out runs/gpu_day [--minutes 8] [--only WORD ...] [--tiny]
    python -m benchmarks.gpu_day --out runs/gpu_day --block    prints the tables of --out as one text for an issue

PART: 1 right, 2 attention, 3 supervised, 4 decoding, 5 steps, 6 memory, 7 largest, 8 servers, 9 kernels; without one,
all in that order, each in a process of its own. A part ends after --minutes with what it has. It writes partN.md
(tables) and partN.json (raw figures) after each case: what failed, ran out of memory or was skipped is a row that says
why. Models and texts are random and made on the spot; nothing is downloaded. Without a GPU, or with --tiny, all is on
tiny shapes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import training

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    """module: of this room, with `measure(report)`."""

    module: str
    title: str


PARTS = {
    1: Part("right", "Right: the same numbers as on a CPU"),
    2: Part("attention", "Attention: forms, lengths, memory, compilations"),
    3: Part("supervised", "SFT, the reward model and DPO of 1.3 billion weights"),
    4: Part("decoding", "Decoding"),
    5: Part("steps", "A GRPO and a PPO step of 1.3 billion weights"),
    6: Part("memory", "Memory: the estimate beside what was held"),
    7: Part("largest", "The largest that fits"),
    8: Part("servers", "Weights to rollout servers"),
    9: Part("kernels", "Kernels: one model, as it is, keeping less, fused, compiled"),
}


def main(argv: Sequence[str]) -> int:
    """Run the parts; 1 if one of them ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_day"), help="folder of the tables, runs and models")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a part")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name holds one of these")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes also on a GPU: tries the command itself")
    parser.add_argument("--block", action="store_true", help="print the tables of --out for an issue; measure nothing")
    arguments = parser.parse_args(argv)
    if arguments.block:
        print(block(arguments.out.resolve()))
        return 0
    parts = arguments.parts or list(PARTS)
    if len(parts) == 1:
        return run_part(parts[0], arguments)
    others = [f"--out={arguments.out}", f"--minutes={arguments.minutes}", *(["--tiny"] * arguments.tiny)]
    others += ["--only", *arguments.only] if arguments.only else []
    # What one part leaves in a GPU's context, an error too, does not reach the next.
    codes = [
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_day", str(part), *others], cwd=ROOT, check=False
        ).returncode
        for part in parts
    ]
    return int(any(codes))


def block(out: Path) -> str:
    """The tables of `out` as one text that an issue takes, without the rows of cases that nobody wanted."""
    title, hidden, most = f"threestep {training.__version__}, gpu_day", "skipped: not asked for", 60_000
    tables, left_out = [], []
    for path in sorted(out.glob("part*.md")):
        lines = [line for line in path.read_text().splitlines() if hidden not in line]
        table = "\n".join(lines).replace(str(out), "OUT").replace(str(Path.home()), "~")
        if sum(map(len, tables)) + len(table) > most:  # an issue holds 65,536 characters
            left_out.append(path.name)
        else:
            tables.append(table)
    if not tables:
        return f"No part has been measured in {out}: `python -m benchmarks.gpu_day --out {out}` measures them."
    gpu = re.search(r"^- GPU: (.+)$", tables[0], re.MULTILINE)
    notes = [f"Too long for an issue, attach: {', '.join(left_out)}", ""] if left_out else []
    summary = f"<details><summary>{title}: {gpu[1] if gpu else 'GPU unknown'}</summary>"
    return "\n\n".join([summary, *tables, *notes, "</details>"])


def _part(word: str) -> int:
    if word not in map(str, PARTS):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(map(str, PARTS))}, got {word}")
    return int(word)


def run_part(number: int, arguments: argparse.Namespace) -> int:
    """Measure one part here, print its tables."""
    from benchmarks.gpu_day import machine
    from benchmarks.gpu_day.record import Report

    part, head = PARTS[number], machine.described()
    full = machine.device().type == "cuda" and not arguments.tiny
    head["shapes"] = "full" if full else "tiny: these figures only show that the command runs"
    for name, value in head.items():
        print(f"{name}: {value}", file=sys.stderr, flush=True)
    report = Report(
        number, part.title, arguments.out.resolve(), full, 60 * arguments.minutes, head, tuple(arguments.only)
    )
    import_module(f"benchmarks.gpu_day.{part.module}").measure(report)
    report.write()
    print(report.table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
