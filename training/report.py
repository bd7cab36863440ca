"""One page about a run, or about several beside each other: curves, samples, time, settings.

    python -m training.report RUN [RUN ...] [--out report.html] [--png FOLDER]

RUN is the --output_dir of a step or of all_steps. The page is one HTML file that needs no network and no script. Every
program writes its own at its end; this one compares runs, and works on old, stopped and unfinished ones too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.utils.run.errors import ThreestepError, nearest_names
from training.utils.run.program import run_program


def main(argv: Sequence[str]) -> None:
    """Read the runs, write the page and, on request, a picture of every chart."""
    options = _parse(argv)

    from training.utils.run.report.writing import REPORT_NAME, write_report

    single = options.runs[0] if len(options.runs) == 1 else "."
    out = Path(options.out) if options.out else Path(single) / REPORT_NAME
    print(write_report(options.runs, out))
    if options.png:
        from training.utils.run.report.png import write_pictures

        for path in write_pictures(options.runs, Path(options.png)):
            print(path)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.report",
        description="One page about a run, or about several beside each other.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the --output_dir of a step or of all_steps")
    parser.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the run's folder; of several: here)"
    )
    parser.add_argument("--png", metavar="FOLDER", help="write every chart as a PNG too")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        near = nearest_names(unknown[0].lstrip("-").split("=")[0], ("out", "png"))
        raise ThreestepError(f"python -m training.report has no flag {unknown[0]}{near}")
    if not options.runs:
        raise ThreestepError("python -m training.report expects one or more run folders: the --output_dir of a run")
    return options


if __name__ == "__main__":
    run_program(main)
