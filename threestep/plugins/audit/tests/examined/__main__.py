"""Examine the judge: 60 faults planted one at a time into a plain trainer and into ours, and steps that are right.

    python -m threestep.plugins.audit.tests.examined [--only dpo] [--plain] [--further] [--right 0]

Without words: every fault, and 300 right steps, about six minutes on two cores. --only: the faults whose names have
this word. --plain: the plain trainer's alone, half a minute. --further: twelve more, written after the judge had
learned from the sixty. --right: how many right steps.

A line for each fault: `right` or `wrong` for its quantity and for its cause, and what the judge says. Faults of one who
did not write the judge's causes; exit code 1 below 55 quantities, 45 causes or with a false alarm.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

LEAST_QUANTITIES, LEAST_CAUSES = 55, 45


def main(argv: Sequence[str]) -> None:
    """Print the table and the score."""
    parser = argparse.ArgumentParser(prog="python -m threestep.plugins.audit.tests.examined", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--plain", action="store_true", help="the plain trainer's faults alone")
    parser.add_argument("--further", action="store_true", help="twelve other faults of the plain trainer alone")
    parser.add_argument("--right", type=int, default=300, help="right steps of the plain trainer")
    parser.add_argument("--seed", type=int, default=1, help="of the plain trainer")
    options = parser.parse_args(argv)
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")
    alarms = _false_alarms(options.right, options.seed)
    quantities = causes = count = 0
    for fault, verdict in _verdicts(options):
        found, explained = verdict.finds(fault), verdict.explains(fault)
        quantities, causes, count = quantities + found, causes + explained, count + 1
        marks = " | ".join("right" if each else "wrong" for each in (found, explained))
        expected = f"{fault.words} | {fault.quantity[0]}: {fault.cause}"
        print(f"| {fault.name} | {expected} | {verdict.sentence} | {marks} |", flush=True)
    print(f"{count} faults: {quantities} at their quantity, {causes} with their cause")
    print(f"{options.right} right steps: {alarms} false alarms")
    enough = quantities >= LEAST_QUANTITIES and causes >= LEAST_CAUSES
    if alarms or not (enough or options.only or options.plain or options.further):
        sys.exit(1)


def _false_alarms(count: int, seed: int) -> int:
    from threestep.plugins.audit.tests.examined.scoring import judged, right_setups, write_plain

    alarms = 0
    for setup in islice(right_setups(seed), count):
        with tempfile.TemporaryDirectory() as place:
            verdict = judged(write_plain(Path(place), setup))
        if verdict.quantity:
            alarms += 1
            print(f"false alarm: {setup}: {verdict.sentence}", flush=True)
    return alarms


def _verdicts(options: argparse.Namespace) -> Iterator:
    """(fault, verdict), of the plain trainer's faults and then of ours."""
    from threestep.plugins.audit.tests.examined.further_faults import FURTHER_FAULTS
    from threestep.plugins.audit.tests.examined.plain_faults import PLAIN_FAULTS
    from threestep.plugins.audit.tests.examined.scoring import of_plain_fault

    for fault in FURTHER_FAULTS if options.further else PLAIN_FAULTS:
        if options.only in fault.name:
            yield fault, of_plain_fault(fault, options.seed)
    if options.plain or options.further:
        return
    from threestep.plugins.audit.tests.examined.our_faults import OUR_FAULTS
    from threestep.plugins.audit.tests.examined.ours import Workshop

    ours = [fault for fault in OUR_FAULTS if options.only in fault.name]
    if ours:
        with tempfile.TemporaryDirectory(prefix="examined_") as place, ThreadPoolExecutor(2) as pool:
            yield from zip(ours, pool.map(Workshop(Path(place)).verdict, ours), strict=True)


if __name__ == "__main__":
    main(sys.argv[1:])
