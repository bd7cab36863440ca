"""Explains one optimizer step token by token: each token's share of the update, and the same step under other rules.

    threestep audit explain RUN --step 10 [--held_out FILE.jsonl] [--last 5] [--with "advantage=rloo"] [--out FOLDER]
    threestep audit explain RUN/records/step_000010

A step without recorded weights is rerun, with --trust_run, from the checkpoint before it or from the start, in a
separate folder. Without the flag, none of the run's code is run. Writes explained.html, a page, and tokens.parquet,
with a row for each token, to a new folder in RUN/explained, or to --out. Nothing else in the run's folder is written.

--held_out: responses that the step did not train on, one per line with `prompt` and `response`. The page shows what the
step did to them, to first order and actually; with --last, it also shows which sequences of the last steps taught them.
--with, --without_row, --with_mask: the same step, with the same samples, under another rule.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from threestep.plugins.explain.at_end import EXPLAINED, PAGE
from training.utils.flags.arguments import ProgramParser
from training.utils.run.program import run_program
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from threestep.plugins.explain.explanation import Explanation

RECORDS, TABLE = "records", "tokens.parquet"


def main(argv: Sequence[str]) -> None:
    """Read or repeat the steps, explain the last, write the page and the table, print what was found."""
    options = _parse(argv)
    out = Path(options.out) if options.out else _free_folder(options)
    check_place("--out", out / PAGE if options.out else out, is_folder=not options.out)
    from threestep.plugins.explain.asked_step import AskedRules, AskedStep, explanation_of

    rules = AskedRules(tuple(options.rules), tuple(options.without_row), tuple(options.with_mask), options.run_rules)
    asked = AskedStep(
        Path(options.run), options.step, options.update, options.last, held_out=options.held_out, rules=rules,
        plain=options.plain, tokenizer=options.tokenizer, work=out / "again", trust_run=options.trust_run,
    )  # fmt: skip
    found = explanation_of(asked)
    replaced = "; they replace the earlier ones" if (out / PAGE).exists() else ""
    _write(found, out)
    if options.json:
        from threestep.plugins.explain.text import as_json

        print(json.dumps(as_json(found)))
    else:
        from threestep.plugins.explain.text import as_lines

        print("\n".join(as_lines(found)))
        print(f"written: {out / PAGE}, {out / TABLE}{replaced}")


def _free_folder(options: argparse.Namespace) -> Path:
    """The folder for a step's page in its run's folder, or beside a record without a run; the next one if it has a
    page. ThreestepError without either."""
    from threestep.plugins.explain.records import is_record
    from training.utils.base.errors import ThreestepError

    given = Path(options.run)
    if not given.is_dir():
        raise ThreestepError(f"{given} is not a folder; pass the folder of a run, or of a record in one")
    update = f"_update{options.update}" if options.update > 1 else ""
    name = given.resolve().name if is_record(given) else f"step_{options.step:06}{update}"
    ends = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    within = given if not is_record(given) else given.parent.parent if given.parent.name == RECORDS else given.parent
    folders = (within / EXPLAINED / f"{name}{end}" for end in ends)
    return next(folder for folder in folders if not os.path.lexists(folder / PAGE))


def _write(found: Explanation, out: Path) -> None:
    from threestep.plugins.explain.page import page
    from training.utils.base.errors import disk_errors

    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / PAGE).write_text(page(found), encoding="utf-8", errors="replace")
        found.to_pandas().to_parquet(out / TABLE, index=False)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("threestep.plugins.explain", "Explain what one optimizer step did, token by token.")
    parser.add_argument("run", metavar="RUN", help="A run's folder, or the folder of a record with --record_values.")
    parser.add_argument("--step", type=int, default=0, help="The step, as in metrics.jsonl; not needed for a record.")
    parser.add_argument(
        "--update", type=int, default=1, help="In step 3: the optimizer step within the rollout, from 1."
    )
    parser.add_argument(
        "--held_out", default="", help="JSON Lines file with `prompt` and `response`, or `ids` and `begin`."
    )
    parser.add_argument(
        "--last",
        type=int,
        default=1,
        help="With --held_out: rank the sequences of this many last steps by their effect.",
    )
    parser.add_argument(
        "--with",
        dest="rules",
        action="append",
        default=[],
        help="Explain the step under other settings, NAME=VALUE; repeatable.",
    )
    parser.add_argument(
        "--without_row",
        type=int,
        action="append",
        default=[],
        help="Explain the step without this row or response; repeatable.",
    )
    parser.add_argument(
        "--with_mask",
        action="append",
        default=[],
        help="FILE.py:NAME of a function from columns to one boolean per token; repeatable.",
    )
    parser.add_argument(
        "--plain", action="store_true", help="Also give shares along plain gradient descent, which takes one more pass."
    )
    parser.add_argument(
        "--run_rules",
        action="store_true",
        help="Run each --with in the run's own program, bit-exactly, from the checkpoint right before the step.",
    )
    parser.add_argument(
        "--trust_run",
        action="store_true",
        help="Run RUN's own code and open its addresses, to rerun steps and to find rows in its data.",
    )
    parser.add_argument("--tokenizer", default=None, help="Tokenizer folder; default: the run's.")
    parser.add_argument(
        "--out", help="Output folder; default: RUN/explained/step_000010, or step_000010_2 if it has a page."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    return parser.parse(argv)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
