"""Writes one page about a run, or several runs side by side: curves, samples, time, settings.

    threestep report RUN [RUN ...] [--out report.html] [--png FOLDER]
    threestep report RUN [RUN ...] --live [--port 8900]

RUN is the --output_dir of a step or of `threestep all`. The page is one HTML file that works offline. Every run writes
its own page when it ends; this program compares runs, and also reads old, stopped and unfinished ones. --live serves a
page, on this machine only, that follows runs in progress.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import ProgramParser
from training.utils.run.program import run_program


def main(argv: Sequence[str]) -> None:
    """Read the runs, write the page and, on request, a PNG of every chart; or serve the page."""
    options = _parse(argv)
    if options.live:
        from threestep.plugins.report.live import serve_live

        return serve_live(options.runs, options.port, lambda address: print(address, flush=True))

    from threestep.plugins.report.writing import REPORT_NAME, write_report

    single = options.runs[0] if len(options.runs) == 1 else "."
    out = Path(options.out) if options.out else Path(single) / REPORT_NAME
    print(write_report(options.runs, out))
    if options.png:
        from threestep.plugins.report.png import write_pngs

        for path in write_pngs(options.runs, Path(options.png)):
            print(path)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(
        "threestep.plugins.report", "Write a page about one run, or about several runs side by side."
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="--output_dir of a step or of `threestep all`")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=("file for the page (default: report.html in the run's folder; for several runs, in the current folder)"),
    )
    parser.add_argument("--png", metavar="FOLDER", help="also write every chart as a PNG")
    parser.add_argument(
        "--live", action="store_true", help="serve a page on 127.0.0.1 that follows the runs; writes no files"
    )
    parser.add_argument("--port", type=int, metavar="N", help="port for --live; 0 picks a free one (default: 8900)")
    options = parser.parse(argv)
    if options.live and (options.out or options.png):
        raise ThreestepError(
            "--live serves the page and writes no files, so it does not work with --out or --png; leave one of them out"
        )
    if options.port is not None and not options.live:
        raise ThreestepError(f"--port {options.port} needs --live; add --live, or leave --port out")
    options.port = 8900 if options.port is None else options.port
    if not 0 <= options.port <= 65535:
        raise ThreestepError(f"--port expects a number from 0 to 65535, got {options.port}")
    if not options.runs:
        raise ThreestepError(f"{parser.prog} expects one or more run folders; pass the --output_dir of a run")
    return options


if __name__ == "__main__":
    run_program(main)
