"""The flag by which a run explains its steps, and what it cannot go with. Cheap to import: `--help` loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from threestep.plugins.audit.flags import check_rows, needs_of
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes
    from training.utils.plugins.plugin import StepNeeds


@dataclass
class ExplainArguments:
    """Explanations of steps, beside the run."""

    topic: ClassVar[str] = "run"
    may_change: ClassVar[bool] = True

    explain_steps: list[int] = flag(
        [],
        "Explain what each token did in these steps (in step 3, in these rollouts), as `threestep audit explain` "
        "does: keep their records with values, and write OUTPUT_DIR/explained at the end of the run.",
        "steps >= 1",
    )


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note rows that a record cannot hold (`Hooks.check`)."""
    check_rows(flags, mistakes, "--explain_steps", _asks(flags))


def step_needs(flags: Any) -> StepNeeds:
    """The needs of explained steps, which are recorded (`Hooks.step_needs`)."""
    return needs_of("--explain_steps", _asks(flags))


def _asks(flags: Any) -> bool:
    return bool(flags.added.of(ExplainArguments).explain_steps)
