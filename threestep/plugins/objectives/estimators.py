"""Entries of the table of advantage estimators, and the flags that each alone has. Cheap to import: `--help` reaches
this module."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.base.user_files import imported
from training.utils.flags.flags import flag
from training.utils.plugins.objectives import Estimator


@dataclass
class TokenBaselineArguments:
    """Flags of the optimal token baseline."""

    otb_zero_tail: bool = flag(
        True,
        "optimal_token_baseline: use a baseline of 0 for the tokens at positions that only a group's longest "
        "response reaches; false uses that response's own return, so these tokens contribute no gradient.",
        topic="advantage",
    )


GRPO_PASSK = Estimator(imported("threestep.plugins.objectives.groups:grpo_passk"), needs_groups=True, norms=True)
OPO = Estimator(imported("threestep.plugins.objectives.groups:opo"), needs_groups=True)
GPG = Estimator(imported("threestep.plugins.objectives.groups:gpg"), needs_groups=True)
TOKEN_BASELINE = Estimator(
    imported("threestep.plugins.objectives.token_baseline:optimal_token_baseline"),
    needs_groups=True,
    needs_policy=True,
    flags=TokenBaselineArguments,
)
