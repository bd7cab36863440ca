"""Choices of step 3 for flags that were left to `auto`, once the models are loaded and nothing has been drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.dry_run import chosen_reuse, with_reuse
from training.step3_ppo.flags.checks import guesser
from training.step3_ppo.parts.assembly import why_not_reused
from training.utils.base.errors import ThreestepError
from training.utils.contracts.guessers import BY_HEAD
from training.utils.dry_run.device import PlannedDevice
from training.utils.dry_run.estimate import kept_counts
from training.utils.flags.auto import AS_BEGUN, AutoChoice

if TYPE_CHECKING:
    from training.step3_ppo.parts.inputs import PpoOpening
    from training.step3_ppo.roles.roles import Roles
    from training.utils.setup.opened_run import OpenedRun

# Of a family whose forward needs numbers, which a model without weights does not have.
_UNCOUNTED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ThreestepError)


def settled(opened: OpenedRun, opening: PpoOpening, roles: Roles, free_bytes: int) -> tuple[OpenedRun, PpoOpening]:
    """Return both with the choices made, by what all ranks know. free_bytes: of the rank that has the least, before the
    models were loaded. A collective."""
    flags, choices = opening.flags, list[AutoChoice]()
    if flags.ppo.reuse_forwards is None and not flags.ppo.val_only:
        choices.append(_reuse(opened, opening, roles, free_bytes))
        opening = opening._replace(flags=with_reuse(flags, choices[0].value))
    if flags.ppo.speculate_by is None and flags.ppo.speculate != "0":
        chosen = guesser(flags)
        choices.append(AutoChoice("speculate_by", chosen, f"there is {'a' if chosen == BY_HEAD else 'no'} head"))
    return opened.settled(choices), opening


def _reuse(opened: OpenedRun, opening: PpoOpening, roles: Roles, free_bytes: int) -> AutoChoice:
    """A resumed run keeps what it began with, wherever it still can."""
    if (media := opening.inputs.media) is not None:
        return AutoChoice("reuse_forwards", False, f"prompts have {media.name}")
    begun = opened.plan.began_with("reuse_forwards")
    if begun is False:
        return AutoChoice("reuse_forwards", False, AS_BEGUN)
    device = PlannedDevice(opening.ranks.device.type == "cuda", None if begun else free_bytes)
    try:
        choice = chosen_reuse(opening.flags, opening.components, kept_counts(), device)
    except _UNCOUNTED:
        return AutoChoice("reuse_forwards", False, "the memory of a model of this family cannot be counted")
    if choice.value and (why := why_not_reused(roles)) is not None:
        return AutoChoice(choice.name, False, why)
    return AutoChoice(choice.name, True, AS_BEGUN) if begun and choice.value else choice
