"""A correction that does not go with the policy loss, and flags of one where there is none. Cheap to import."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from threestep.plugins.mismatch.arguments import MismatchArguments
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note what does not go together. flags: of a step."""
    given = flags.added.of(MismatchArguments)
    if given == MismatchArguments():  # also in other steps
        return
    from training.step3_ppo.flags.algorithm import policy_loss_named
    from training.step3_ppo.flags.rollout_choices import draws_exactly

    with contextlib.suppress(ThreestepError):  # names that are unknown are noted elsewhere
        has_ratio = policy_loss_named(flags.algorithm.policy_loss).has_ratio
        note_mistakes(given, flags.algorithm.policy_loss, has_ratio, is_exact=draws_exactly(flags), mistakes=mistakes)


def note_mistakes(
    given: MismatchArguments, policy_loss: str, has_ratio: bool, *, is_exact: bool, mistakes: Mistakes
) -> None:
    """has_ratio: of the policy's loss. is_exact: as of `MismatchArguments.chosen`."""
    found = given.chosen(is_exact)
    mistakes.require(
        not (found.bypass and found.correction != "none" and has_ratio),
        f"with --mismatch_bypass, the ratio in --policy_loss {policy_loss} is already relative to the rollout's "
        f"policy, so --mismatch_correction {found.correction} would weight by the same ratio again; set --policy_loss "
        "gpg or --mismatch_correction none",
    )
    for name in ("level", "threshold_lower", "normalize"):
        mistakes.require(
            found.correction != "none" or not getattr(given, f"mismatch_{name}"),
            f"--mismatch_{name} {getattr(given, f'mismatch_{name}')} applies to the weights of a correction, but "
            f"--mismatch_correction is none; set --mismatch_correction truncate or mask, or remove --mismatch_{name}",
        )
