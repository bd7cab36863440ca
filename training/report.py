"""One page about a run, or about several side by side: curves, samples, time, settings.

    python -m training.report RUN [RUN ...] [--out report.html] [--png FOLDER]

RUN is the --output_dir of a step or of all_steps. The page is one HTML file without network or script. Every run writes
its own at its end; this program compares runs, and reads old, stopped and unfinished ones too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.utils.run.arguments import ProgramParser
from training.utils.run.errors import ThreestepError
from training.utils.run.program import run_program


def main(argv: Sequence[str]) -> None:
    """Read the runs, write the page and, on request, a picture of every chart."""
    options = _parse(argv)

    from training.utils.report.writing import REPORT_NAME, write_report

    single = options.runs[0] if len(options.runs) == 1 else "."
    out = Path(options.out) if options.out else Path(single) / REPORT_NAME
    print(write_report(options.runs, out))
    if options.png:
        from training.utils.report.png import write_pictures

        for path in write_pictures(options.runs, Path(options.png)):
            print(path)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("training.report", "One page about a run, or about several side by side.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the --output_dir of a step or of all_steps")
    parser.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the run's folder; for several runs: here)"
    )
    parser.add_argument("--png", metavar="FOLDER", help="write every chart as a PNG too")
    options = parser.parse(argv)
    if not options.runs:
        raise ThreestepError("python -m training.report expects one or more run folders: the --output_dir of a run")
    return options


if __name__ == "__main__":
    run_program(main)
