"""Explains one optimizer step token by token: each token's share of the update, and the same step under other rules.

    threestep audit explain RUN --step 10 [--held_out FILE.jsonl] [--last 5] [--with "advantage=rloo"] [--out FOLDER]
    threestep audit explain RUN/records/step_000010

A step without recorded weights is rerun, with --trust_run, from the checkpoint before it or from the start, in a
separate folder. The run's folder is only read, and without the flag none of its code is run. Writes explained.html, a
page, and tokens.parquet, with a row for each token.

--held_out: responses that the step did not train on, one per line with `prompt` and `response`. The page shows what the
step did to them, to first order and actually; with --last, it also shows which sequences of the last steps taught them.
--with, --without_row, --with_mask: the same step, with the same samples, under another rule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.flags.arguments import ProgramParser
from training.utils.run.program import run_program
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from threestep.plugins.explain.explanation import Explanation

DEFAULT_OUT = "runs/explained"
PAGE, TABLE = "explained.html", "tokens.parquet"


def main(argv: Sequence[str]) -> None:
    """Read or repeat the steps, explain the last, write the page and the table, print what was found."""
    options = _parse(argv)
    out = Path(options.out)
    check_place("--out", str(out / PAGE))
    from threestep.plugins.explain.asked_step import AskedRules, AskedStep, explanation_of

    rules = AskedRules(tuple(options.rules), tuple(options.without_row), tuple(options.with_mask), options.run_rules)
    asked = AskedStep(
        Path(options.run), options.step, options.update, options.last, held_out=options.held_out, rules=rules,
        plain=options.plain, tokenizer=options.tokenizer, work=out / "again", trust_run=options.trust_run,
    )  # fmt: skip
    found = explanation_of(asked)
    _write(found, out)
    if options.json:
        from threestep.plugins.explain.text import as_json

        print(json.dumps(as_json(found)))
    else:
        from threestep.plugins.explain.text import as_lines

        print("\n".join(as_lines(found)))
        print(f"written: {out / PAGE}, {out / TABLE}")


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
    parser.add_argument("--out", default=DEFAULT_OUT, help=f"Output folder; default: {DEFAULT_OUT}.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    return parser.parse(argv)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
