"""Advantage estimators. The room serves `--advantage`, by the table of its names. Cheap to import."""

from __future__ import annotations

from training.utils.base.user_files import either, imported
from training.utils.flags.added import with_added
from training.utils.plugins.objectives import Estimator

_HERE = f"{__name__}.estimators"
NO_ADVANTAGE = "none"  # for a teacher alone
ESTIMATORS = with_added(
    "advantages",
    {
        "gae": Estimator(imported(f"{_HERE}:gae"), needs_critic=True, whitens=True, returns_alone=True),
        "grpo": Estimator(imported(f"{_HERE}:grpo"), needs_groups=True, norms=True),
        "rloo": Estimator(imported(f"{_HERE}:rloo"), needs_groups=True, norms=True),
        "reinforce++": Estimator(imported(f"{_HERE}:reinforce_plus_plus"), whitens=True),
        "reinforce++_baseline": Estimator(
            imported(f"{_HERE}:reinforce_plus_plus_baseline"), needs_groups=True, whitens=True
        ),
        "remax": Estimator(imported(f"{_HERE}:remax"), needs_greedy=True),
        NO_ADVANTAGE: Estimator(imported(f"{_HERE}:none")),
    },
    Estimator,
)
WITH_CRITIC = either(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)
