"""How the program of a step that trains one model begins: its flags, its dry run, its run.

Cheap to import: `--help` reaches this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from training.utils.loading.folder_kinds import check_model_folder
from training.utils.opening.flags import OneModelFlags
from training.utils.run.arguments import parse_arguments
from training.utils.run.step import Step

if TYPE_CHECKING:
    from training.utils.opening.opened_model import OpenedModel

__all__ = ["OneModelFlags", "one_model", "one_model_program"]

_LAUNCHERS = "One process needs no launcher; several ranks start by `deepspeed`, torchrun or `accelerate launch`."


def one_model_program(
    step: Step,
    description: str | None,
    scores: bool = False,
    responses: int = 1,
    check: Callable[[OneModelFlags], None] | None = None,
) -> Callable[[Callable[[OneModelFlags, Any], None]], Callable[[Sequence[str]], None]]:
    """Decorates main(flags, own flags) of a step: the program parses its command line, prints the plan and ends with
    `--dry_run`, and otherwise calls main.

    scores: for the plan: the model is a reward model
    responses: for the plan: of one prompt, 2 for pairs
    check: raises ThreestepError for flags of several groups that contradict each other
    """

    def decorated(main: Callable[[OneModelFlags, Any], None]) -> Callable[[Sequence[str]], None]:
        @functools.wraps(main)
        def program(argv: Sequence[str]) -> None:
            groups = parse_arguments(step.groups, argv, f"{description}\n{_LAUNCHERS}", step.old_flags)
            flags = OneModelFlags(step, groups, *groups)
            if check is not None:
                check(flags)
            check_model_folder(flags.model.model_name_or_path)
            if not flags.run.dry_run:
                return main(flags, flags.own)
            from training.utils.dry_run.one_model import dry_run

            longest_tokens = flags.data.rows.max_seq_len
            dry_run(step.program, groups, flags.own.learning_rate, longest_tokens, scores, responses)

        return program

    return decorated


def one_model(
    flags: OneModelFlags,
    phase: int,
    scores: bool = False,
    rereads_start: bool = False,
    check_rows: Callable[[Sequence[Any]], None] | None = None,
) -> AbstractContextManager[OpenedModel[Any]]:
    """Open the run: its folder, tokenizer, rows, model, engine and metrics, ready for a loop.

    phase: the rows to train on, 1 (sentences) or 2 (ranked responses)
    scores: the model is a reward model; otherwise it predicts tokens
    rereads_start: a resumed run reads the start model's own weights again, as a reference does
    check_rows: called with the training rows before the model loads
    """
    from training.utils.opening.opened_model import opened_model

    return opened_model(flags, phase, scores, rereads_start, check_rows)
