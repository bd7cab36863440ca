"""The parts of a model that keep less: gated MLPs and RMSNorms of the usual forms."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from training.utils.models.lean.gated_mlp import GatedMlp, lean_mlp
from training.utils.models.lean.rms_norm import RmsNorm, lean_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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


def keep_all(parts: Iterable[nn.Module]) -> dict[nn.Module, GatedMlp | RmsNorm]:
    """Have those of `parts` that keep less keep all, in place; return what their forwards were."""
    return {
        part: vars(part).pop("forward") for part in parts if isinstance(vars(part).get("forward"), (GatedMlp, RmsNorm))
    }


@contextlib.contextmanager
def keeping_all(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, those of `parts` that keep less keep all, as they do in tiles."""
    less = keep_all(parts)
    try:
        yield
    finally:
        for part, forward in less.items():
            part.forward = forward
