"""The parts of a model that keep less: gated MLPs and RMSNorms of the usual forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.speed.lean.gated_mlp import GatedMlp, lean_mlp
from threestep.plugins.speed.lean.rms_norm import RmsNorm, lean_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    LeanForward = Callable[[nn.Module], GatedMlp | RmsNorm | None]


def keep_less(model: nn.Module, kinds: Sequence[LeanForward] = (lean_mlp, lean_norm)) -> int:
    """Have the parts of `model` that are of these kinds keep less, in place; return how many. They are those whose
    class has a forward that many families of transformers share; adapters may come before or after."""
    changed = 0
    for part in model.modules():
        lean = None if "forward" in vars(part) else next(filter(None, (kind(part) for kind in kinds)), None)
        if lean is not None:
            part.forward = lean  # type: ignore[assignment]
            changed += 1
    return changed
