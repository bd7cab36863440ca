"""Choices of step 3 for flags that were left to `auto`, once the models are loaded and nothing has been drawn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from training.step3_ppo.flags.reuse import ROLES, VALUES, chosen_by_flags, why_apart, with_reuse
from training.step3_ppo.parts.assembly import why_not_reused
from training.utils.base.memory import PlannedDevice
from training.utils.flags.auto import AS_BEGUN, AutoChoice
from training.utils.setup.step_program import CheckedStep, chosen_by_plugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from training.step3_ppo.parts.inputs import PpoOpening
    from training.step3_ppo.roles.roles import Roles
    from training.utils.setup.opened_run import OpenedRun


def settled(opened: OpenedRun, opening: PpoOpening, roles: Roles, free_bytes: int) -> tuple[OpenedRun, PpoOpening]:
    """Return both with the choices made, by what all ranks know. free_bytes: of the rank that has the least, before the
    models were loaded. A collective."""
    flags, choices = opening.flags, list[AutoChoice]()
    for name, role in ROLES.items():
        if getattr(flags.ppo, name) is None and not flags.ppo.val_only:
            choices.append(_reuse(name, opened, opening, free_bytes, why_not=partial(why_not_reused, roles, role)))
            opening = opening._replace(flags=with_reuse(opening.flags, choices[-1]))
    if opening.components.loop is not None:
        choices += opening.components.loop.choices()
    return opened.settled(choices), opening


def _reuse(
    name: str, opened: OpenedRun, opening: PpoOpening, free_bytes: int, *, why_not: Callable[[], str | None]
) -> AutoChoice:
    """A resumed run keeps what it began with, wherever it still can. name: FORWARDS or VALUES. why_not: as of
    `why_not_reused`. A collective."""
    if (media := opening.inputs.media) is not None:
        return AutoChoice(name, False, f"prompts have {media.name}")
    begun = opened.plan.began_with(name)
    if begun is False:
        return AutoChoice(name, False, AS_BEGUN)
    choice = _by_flags(name, opening, free_bytes, begun=bool(begun))
    if choice.value and (why := why_not()) is not None:
        return AutoChoice(name, False, why)
    return choice


def _by_flags(name: str, opening: PpoOpening, free_bytes: int, *, begun: bool) -> AutoChoice:
    flags, components = opening.flags, opening.components
    if begun:
        why = why_apart(name, flags, components.algorithm)
        return AutoChoice(name, why is None, why or AS_BEGUN)
    choice = chosen_by_flags(name, flags, components.algorithm)
    if name == VALUES or not choice.value:
        return choice
    device = PlannedDevice(opening.ranks.device.type == "cuda", free_bytes)
    found = chosen_by_plugin(name, CheckedStep(flags, components=components), device)
    return found or AutoChoice(name, False, "nothing here counts the memory that true takes")
