"""A step's program: from its command line to its run, or to what a plugin does in its place. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.user_files import named_object
from training.utils.flags.added import in_place_of_run
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.memory import PlannedDevice
    from training.utils.data.kinds.kind import RowKind
    from training.utils.flags.flags import AutoChoice


@dataclass(frozen=True)
class CheckedStep:
    """A step whose flags are parsed and checked; nothing is loaded.

    flags: `OneModelFlags`; of step 3 `PpoFlags`
    kind: of the rows of a step that trains one model. scores: that is a reward model
    components: of step 3, what the names in its flags select
    """

    flags: Any
    kind: RowKind | None = None
    scores: bool = False
    components: Any = None


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


def chosen_by_plugin(name: str, step: CheckedStep, device: PlannedDevice) -> AutoChoice | None:
    """Return what a flag stands for that was left to `auto`; None where no plugin chooses it."""
    place = added("auto_choices", ()).get(name)
    return None if place is None else named_object(place)(step, device)
