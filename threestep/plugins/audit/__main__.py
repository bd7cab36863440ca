"""Audit a training step: which number is wrong, where, and why. Or compare two runs: where they first differ.

    threestep audit RUN/records/step_000010 [--as "grpo, token mean, k3"] [--json] [--out FILE]
    threestep audit RUN_A RUN_B [--trust_run] [--work FOLDER] [--python_b PYTHON] [--code_b FOLDER] ...

RECORD is a folder written by --record_steps or by a recorder for another trainer. Every quantity is recomputed in
float64 from those before it, by references that share no code with the trainers. The first that differs is named, by
how much and on which rows and tokens, and the cause, if a known one gives the recorded numbers. A part that the record
lacks is listed as not judged. Exit code 1: something differs.

For two runs, their digests.jsonl give the first step that differs; none of their code is run. With --trust_run
both are then resumed from the checkpoint before it, or started again, and recorded at that step, and the records are
compared: the row, the rank, the token and the layer that differ first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import ProgramParser
from training.utils.run.program import run_program
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DIFFERENT_EXIT_CODE = 1
DEFAULT_WORK = "runs/audit"


def main(argv: Sequence[str]) -> None:
    """Read the record, judge it, print what was found."""
    options = _parse(argv)
    if options.other:
        _compare_runs(options)
        return
    from threestep.plugins.audit.judge import first_wrong, judge
    from threestep.plugins.audit.quantities.ids import notes_on_ids
    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.audit.recording.files import read_record
    from threestep.plugins.audit.text import as_json, as_lines
    from threestep.plugins.audit.words import settings_of_words

    settings = settings_of_words(options.settings)
    record = read_record(Path(options.record))
    step = AuditedStep(record, settings)
    findings, notes = judge(step), notes_on_ids(step)
    if options.out:
        from threestep.plugins.audit.page import page

        name = "/".join(Path(options.record).resolve().parts[-3:])  # RUN/records/step_000010
        Path(options.out).write_text(page(name, record.head, findings, notes), encoding="utf-8")
    if options.json:
        print(json.dumps({**as_json(record.head, findings), "notes": notes}))
    else:
        print("\n".join([*as_lines(record.head, findings), *(f"note: {note}" for note in notes)]))
    if first_wrong(findings) is not None:
        sys.exit(DIFFERENT_EXIT_CODE)


def _compare_runs(options: argparse.Namespace) -> None:
    """Bisect two runs, print what was found."""
    from threestep.plugins.audit.bisect.bisect import bisect
    from threestep.plugins.audit.bisect.digest_files import read_digests
    from threestep.plugins.audit.bisect.page import page
    from threestep.plugins.audit.bisect.rerun import starter
    from threestep.plugins.audit.bisect.text import as_json, as_lines

    a, b = (read_digests(Path(folder)) for folder in (options.record, options.other))
    work = Path(options.work).resolve() if options.trust_run else None
    by = [(options.python_a, options.code_a), (options.python_b, options.code_b)]
    starts = [starter(*given, run.threads) for given, run in zip(by, (a, b), strict=True)]
    found = bisect(a, b, work, starts)
    if options.out:
        Path(options.out).write_text(page(a, b, found), encoding="utf-8")
    print(json.dumps(as_json(a, b, found)) if options.json else "\n".join(as_lines(a, b, found)))
    if found.comparison.first is not None:
        sys.exit(DIFFERENT_EXIT_CODE)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("threestep.plugins.audit", "Find which number of a training step is wrong, where, and why.")
    parser.add_argument(
        "record",
        nargs="?",
        metavar="RECORD",
        help="the record of a step (a folder with record.json), or the first of two runs",
    )
    parser.add_argument("other", nargs="?", metavar="RUN_B", help="the second run, a folder with digests.jsonl")
    parser.add_argument(
        "--as",
        dest="settings",
        default="",
        metavar="WORDS",
        help="what the step should be, instead of the recorded settings: 'grpo, token mean, k3', or NAME=VALUE",
    )
    parser.add_argument(
        "--work", default=DEFAULT_WORK, metavar="FOLDER", help="with two runs: folder for the reruns [%(default)s]"
    )
    parser.add_argument(
        "--trust_run",
        action="store_true",
        help="with two runs: rerun both up to the step that differs, with their own settings and code",
    )
    for side in "ab":
        parser.add_argument(
            f"--python_{side}",
            metavar="PYTHON",
            help=f"with two runs: Python interpreter for the rerun of {side.upper()}, with its threestep and "
            "libraries; default: this one",
        )
        parser.add_argument(
            f"--code_{side}",
            metavar="FOLDER",
            help=f"with two runs: threestep checkout for the rerun of {side.upper()}, such as a `git worktree add`; "
            "default: the interpreter's",
        )
    parser.add_argument("--out", metavar="FILE", help="also write the findings to this HTML file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse(argv)
    if not options.record:
        raise ThreestepError(f"{parser.prog} expects the folder of a record, such as RUN/records/step_000010")
    _refuse_what_has_no_effect(parser.prog, options)
    if options.out:
        check_place("--out", options.out)
    return options


def _refuse_what_has_no_effect(program: str, options: argparse.Namespace) -> None:
    """ThreestepError for flags of a record where two runs are given, and the other way round."""
    of_reruns = ("python_a", "python_b", "code_a", "code_b")
    given = [name for name in of_reruns if getattr(options, name)] + ["work"] * (options.work != DEFAULT_WORK)
    if options.other and given and not options.trust_run:
        raise ThreestepError(f"{program}: --{given[0]} is only for reruns; add --trust_run, or remove --{given[0]}")
    given += ["trust_run"] * options.trust_run
    if options.other and options.settings:
        raise ThreestepError(f"{program}: --as applies to a single record, but two runs were given; remove --as")
    if not options.other and given:
        raise ThreestepError(
            f"{program}: --{given[0]} is only for two runs (RUN_A RUN_B), but one folder was given; remove --{given[0]}"
        )


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
