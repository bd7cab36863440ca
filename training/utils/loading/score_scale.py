"""Mean and standard deviation of a reward model's scores on chosen responses, in its configuration.

Step 2 writes them, step 3 reads them. Plain transformers keeps both and ignores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import load_config

_MEAN, _STD = "threestep_score_mean", "threestep_score_std"


@dataclass(frozen=True)
class ScoreScale:
    """mean, std: of the scores of the training prompts' chosen responses. Normalized, a score s is (s - mean) / std."""

    mean: float
    std: float


def set_score_scale(config: Any, scale: ScoreScale | None) -> None:
    """Write `scale` into a model's configuration; None removes it."""
    for name, value in ((_MEAN, scale and scale.mean), (_STD, scale and scale.std)):
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


def read_score_scale(name_or_path: str, flag: str) -> ScoreScale:
    """Return the scale in the configuration of a folder or hub name, which the flag `flag` needs.

    Raises ThreestepError if it has none, or a standard deviation that is not positive.
    """
    config = load_config(name_or_path)
    mean, std = getattr(config, _MEAN, None), getattr(config, _STD, None)
    if mean is None or std is None:
        raise ThreestepError(
            f"{flag} needs {_MEAN} and {_STD} in the configuration of '{name_or_path}', which has none: train it "
            "with step 2 (--normalization_rows above 0), or leave the flag out"
        )
    if not std > 0:
        raise ThreestepError(
            f"{flag}: the configuration of '{name_or_path}' has {_STD} {std}, scores that do not vary and cannot "
            "be normalized; leave the flag out"
        )
    return ScoreScale(float(mean), float(std))
