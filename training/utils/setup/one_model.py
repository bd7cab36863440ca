"""The program of a step that trains one model: its flags and its run.

Cheap to import: `--help` reaches this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.added import in_place_of_run
from training.utils.flags.arguments import parse_arguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.plugins.registry import check_by_plugins
from training.utils.run.program import quick_imports, run_program
from training.utils.setup.first_look import look_first
from training.utils.setup.flags import OneModelFlags
from training.utils.setup.opened_model import OpenedModel
from training.utils.setup.result import TrainingResult
from training.utils.setup.step_program import CheckedStep, StepProgram

if TYPE_CHECKING:
    from training.utils.flags.step import Step

__all__ = ["OpenedModel", "TrainingResult", "one_model_program"]


def one_model_program(
    module: str,
    step: Step,
    train: Callable[[OpenedModel, Any], TrainingResult],
    rows: str | Callable[[Any], str],
    *,
    scores: bool = False,
    rereads_start: Callable[[Any], bool] = lambda own: False,
    check: Callable[[OneModelFlags], None] | None = None,
    check_rows: Callable[[Sequence[Any], Any], None] | None = None,
) -> StepProgram:
    """Return a step's main(argv), and call it now if `module`, the caller's `__name__`, is what `python -m` runs.

    main parses the command line, with the module's docstring for `--help`. It opens the run (folder, tokenizer, rows,
    model, engine, metrics), calls train(opened, own flags), and saves the model and the closing figures; or it does
    what a plugin does in place of a run (`InPlaceOfRun`).

    rows: the kind of rows to train on, by its name or as own flags -> its name
    scores: the model is a reward model; otherwise it predicts tokens
    rereads_start: own flags -> True if a resumed run reads the start model's own weights again, as a reference does
    check: raises ThreestepError for flags of several groups that contradict each other
    check_rows: the same for the training rows and the step's own flags, before the model loads
    """
    description = sys.modules[module].__doc__ or ""

    def checked(argv: Sequence[str]) -> CheckedStep:
        groups = parse_arguments(
            step.groups, argv, description, step.old_flags, first_flags=step.first_flags, unread=step.set_aside
        )
        flags = OneModelFlags(step, groups, *groups)
        mistakes = Mistakes()
        check_by_plugins(flags, mistakes)
        mistakes.raise_if_any()
        if check is not None:
            check(flags)
        if scores and flags.model.head_chunk_mb:
            raise ThreestepError(
                f"--head_chunk_mb is for a language model's output layer, got {flags.model.head_chunk_mb} for a reward "
                "model, which has a score for each sequence instead; leave it out"
            )
        check_model_folder(flags.model.model_name_or_path)
        runs = in_place_of_run(flags.settings) is None
        look_first(step, flags.run, flags.checkpoints, flags.data.source, runs=runs)
        with quick_imports():
            from training.utils.data.kinds.table import KINDS

        return CheckedStep(flags, KINDS[rows if isinstance(rows, str) else rows(flags.of_step)], scores)

    def run(checked: CheckedStep) -> None:
        with quick_imports():
            from training.utils.setup.one_model_run import run_one_model

        rereads = rereads_start(checked.flags.of_step)
        run_one_model(checked, train, rereads_start=rereads, check=check, check_rows=check_rows)

    main = StepProgram(checked, run)
    if module == "__main__":
        run_program(main, output_is_log=True)
    return main
