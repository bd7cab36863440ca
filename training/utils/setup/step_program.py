"""A step's program: from its command line to its run, or to what a plugin does in its place.

Cheap to import: `--help` reaches this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import named_object
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import check_earlier_run
from training.utils.data.file_dataset import look_at_data
from training.utils.flags.added import in_place_of_run
from training.utils.flags.arguments import parse_arguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.plugins.registry import check_by_plugins
from training.utils.run.program import quick_imports, run_program
from training.utils.setup.flags import CheckedStep, OneModelFlags

if TYPE_CHECKING:
    from training.utils.flags.step import Step
    from training.utils.setup.training_run import TrainingResult, TrainingRun


@dataclass(frozen=True)
class StepProgram:
    """A step's main(argv).

    checked: parses and checks the command line; ThreestepError for mistakes
    run: trains
    """

    checked: Callable[[Sequence[str]], CheckedStep]
    run: Callable[[CheckedStep], None]

    def __call__(self, argv: Sequence[str]) -> None:
        step = self.checked(argv)
        instead = in_place_of_run(step.flags.settings)
        if instead is None:
            self.run(step)
        else:
            named_object(instead.place)(step)


def one_model_program(
    module: str,
    step: Step,
    train: Callable[[TrainingRun[Any], OneModelFlags], TrainingResult],
    rows: str | Callable[[Any], str],
    *,
    scores: bool = False,
    rereads_start: Callable[[Any], bool] = lambda own: False,
    check: Callable[[OneModelFlags], None] = lambda flags: None,
    check_rows: Callable[[Sequence[Any], Any], None] = lambda rows, own: None,
) -> StepProgram:
    """Return the main(argv) of a step that trains one model, and call it now if `module`, the caller's `__name__`, is
    what `python -m` runs.

    main parses the command line, with the module's docstring for `--help`. It opens the run (folder, tokenizer, rows,
    model, engine, metrics), calls train(run, flags), and saves the model and the closing figures; or it does what a
    plugin does in place of a run (`InPlaceOfRun`).

    rows: the kind of rows to train on, by its name or as own flags -> its name
    scores: the model is a reward model; otherwise it predicts tokens
    rereads_start: own flags -> True if a resumed run reads the start model's own weights again, as a reference does
    check: raises ThreestepError for flags of several groups that contradict each other
    check_rows: the same for the training rows and the step's own flags, before the model loads
    """
    description = sys.modules[module].__doc__ or ""

    def checked(argv: Sequence[str]) -> CheckedStep:
        flags = OneModelFlags(
            step,
            *parse_arguments(
                step.groups, argv, description, step.old_flags, first_flags=step.first_flags, unread=step.set_aside
            ),
        )
        mistakes = Mistakes()
        check_by_plugins(flags, mistakes)
        mistakes.raise_if_any()
        check(flags)
        if scores and flags.model.head_chunk_mb:
            raise ThreestepError(
                f"--head_chunk_mb {flags.model.head_chunk_mb} applies to a language model's output layer, which a "
                "reward model does not have; remove it"
            )
        check_model_folder(flags.model.model_name_or_path)
        look_first(step, flags)
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


def look_first(step: Step, flags: Any) -> None:
    """Look at the run's folder and the data before libraries load and ranks start; at neither where a plugin does
    something else in place of the run. ThreestepError if the folder holds a finished run, or if the data cannot serve
    the step. flags: `OneModelFlags` or `PpoFlags`."""
    if in_place_of_run(flags.settings) is not None:
        return
    if not flags.checkpoints.overwrite:
        check_earlier_run(CheckpointFolder(flags.run.output_dir), resumes=flags.checkpoints.resume is not None)
    if step.number:  # of the phase whose rows it takes
        look_at_data(int(step.number), flags.data.source)
