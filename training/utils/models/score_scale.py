"""The scale of a reward model's scores, kept in its configuration: mean and standard deviation on chosen responses.

Step 2 writes it, step 3 reads it. Plain transformers keeps both numbers and does nothing with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.utils.models.loading import load_config
from training.utils.run.errors import ThreestepError

_MEAN, _STD = "threestep_score_mean", "threestep_score_std"


@dataclass(frozen=True)
class ScoreScale:
    """mean, std: of the scores of the training prompts' chosen responses; a score s is (s - mean) / std on it."""

    mean: float
    std: float


def set_score_scale(config: Any, scale: ScoreScale | None) -> None:
    """Write `scale` into a model's configuration, or take away what is there."""
    for name, value in ((_MEAN, scale and scale.mean), (_STD, scale and scale.std)):
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


def read_score_scale(name_or_path: str, asked_by: str) -> ScoreScale:
    """Return the scale in the configuration of a folder or hub name.

    Raises ThreestepError where it has none, or one that cannot divide; `asked_by` is the flag that wants it.
    """
    config = load_config(name_or_path)
    mean, std = getattr(config, _MEAN, None), getattr(config, _STD, None)
    if mean is None or std is None:
        raise ThreestepError(
            f"{asked_by} needs {_MEAN} and {_STD} in the configuration of '{name_or_path}', which has none: train it "
            "with step 2 (--normalization_rows above 0), or leave the flag out"
        )
    if not std > 0:
        raise ThreestepError(
            f"{asked_by}: the configuration of '{name_or_path}' has {_STD} {std}, scores that do not vary and cannot "
            "be normalized; leave the flag out"
        )
    return ScoreScale(float(mean), float(std))
