"""Some weights of an engine, whole on every rank for more than one forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.utils.engine.gathered import release_gathered

if TYPE_CHECKING:
    from torch import nn

    from training.utils.engine.training_engine import TrainingEngine


@contextlib.contextmanager
def whole_weights(engine: TrainingEngine, weights: list[nn.Parameter]) -> Iterator[None]:
    """Inside, `weights` of `engine` are whole, to be read. A collective under ZeRO-3; no forward or backward of that
    engine may run inside."""
    if engine.settings.zero_stage != 3:
        yield
        return
    import deepspeed

    release_gathered(engine.engine)
    with deepspeed.zero.GatheredParameters(weights):
        yield
