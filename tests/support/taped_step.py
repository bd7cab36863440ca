"""A captured step without a GPU: what a CUDA graph would replay, on a tape.

The operators of one call are noted with their arguments and run again, on whatever the tensors in fixed places hold by
then. Numbers of the host are what they were at the first call, and a question to the device fails, as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operators whose answer or shape the host reads.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount")


class TapedStep:
    """Takes the place of `threestep.plugins.captured.steps.CapturedStep`."""

    made = 0

    def __init__(self, function: Callable[[], torch.Tensor], device: torch.device, before: TapedStep | None = None):
        type(self).made += 1
        function()
        with _Tape() as self._tape:
            self._output = function()

    def __call__(self) -> torch.Tensor:
        return self._tape.replayed(self._output)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator).removeprefix("aten.").split(".")[0]
        asks = name.startswith("index") and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in tree_leaves(args[1])
        )
        if name in WAITS or asks:
            raise RuntimeError(f"the host waits for {name}")
        result = operator(*args, **(kwargs or {}))
        self._calls.append((operator, args, kwargs or {}, result))
        return result

    def replayed(self, output: torch.Tensor) -> torch.Tensor:
        """Run all operators again; return what `output` is now."""
        now: dict[int, torch.Tensor] = {}

        def current(part: torch.Tensor) -> torch.Tensor:
            return now.get(id(part), part)

        for operator, args, kwargs, was in self._calls:
            is_now = operator(
                *tree_map_only(torch.Tensor, current, args), **tree_map_only(torch.Tensor, current, kwargs)
            )
            for before, after in zip(tree_leaves(was), tree_leaves(is_now), strict=True):
                if isinstance(before, torch.Tensor):
                    now[id(before)] = after
        return current(output)
