"""Audit a training step: which number is wrong, where, and why.

    python -m training.audit RUN/records/step_000010 [--as "grpo, token mean, k3"] [--json] [--out FILE]

RECORD is a folder that --record_steps wrote, or a recorder of another trainer. Every quantity is computed again in
float64 from those before it, by references that share no code with the trainers. The first that differs is named, by
how much and on which rows and tokens, and the cause, if a known one gives the recorded numbers. A part that the record
lacks is not judged, by name. Exit code 1: something differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import ProgramParser
from training.utils.run.program import run_program
from training.utils.run.run_paths import check_place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DIFFERENT_EXIT_CODE = 1


def main(argv: Sequence[str]) -> None:
    """Read the record, judge it, print what was found."""
    options = _parse(argv)
    from training.audit.judge import first_wrong, judge
    from training.audit.quantities.step import AuditedStep
    from training.audit.text import as_json, as_lines
    from training.audit.words import settings_of_words
    from training.utils.recording.files import read_record

    settings = settings_of_words(options.settings)
    record = read_record(Path(options.record))
    findings = judge(AuditedStep(record, settings))
    if options.out:
        from training.audit.page import page

        Path(options.out).write_text(page(record.head, findings), encoding="utf-8")
    if options.json:
        print(json.dumps(as_json(record.head, findings)))
    else:
        print("\n".join(as_lines(record.head, findings)))
    if first_wrong(findings) is not None:
        sys.exit(DIFFERENT_EXIT_CODE)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("training.audit", "Which number of a training step is wrong, where, and why.")
    parser.add_argument("record", nargs="?", metavar="RECORD", help="the record of a step: a folder with record.json")
    parser.add_argument(
        "--as",
        dest="settings",
        default="",
        metavar="WORDS",
        help="what the step should be, in place of the recorded settings: 'grpo, token mean, k3', or NAME=VALUE",
    )
    parser.add_argument("--out", metavar="FILE", help="write the findings as one HTML page too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse(argv)
    if not options.record:
        raise ThreestepError(f"{parser.prog} expects the folder of a record, such as RUN/records/step_000010")
    if options.out:
        check_place("--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
