"""torch.compile for a model's blocks.

Each block is compiled separately, as in torchtitan: blocks share their code, so that one compilation is enough, and
gradient checkpointing, LoRA and ZeRO-3's gathering of weights work around and inside of them.

The forward of rows is compiled. A forward with a key-value cache, as in rollouts, is not: each layer of the cache, and
each of its states, would be another compilation, and the compiler's limit would be used up before training begins (8
compilations of a code, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line
from training.utils.models.families import language_part

# Of one code: a mask or none, one row or several, with gradients or without, in train mode or eval mode: 16 for each
# kind of block, and some families have two.
RECOMPILE_LIMIT = 32
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def compile_blocks(model: nn.Module, backend: str = "inductor", limit: int = RECOMPILE_LIMIT) -> int:
    """Compile every transformer block of `model` in place (the whole model if transformers marks no blocks); return how
    many. What reads media is left as it is: it computes one after the other. Rows may have any width; compilation
    happens at the first forward.

    The compiled forward equals the plain one up to rounding. Names of weights do not change.
    limit: compilations of one code; beyond it the blocks run uncompiled, and one line notes it. Blocks of sharded
        weights keep torch's limit and its warning: DeepSpeed's hooks, which gather them, are traced too, and a block
        that has begun to gather cannot be begun anew.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    parts = language_part(model).modules()
    blocks = [part for part in parts if isinstance(part, GradientCheckpointingLayer)] or [model]
    fallback = _Fallback(type(model).__name__, limit)
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
        block._compiled_call_impl = _CompiledBlock(block, fallback)
    return len(blocks)


class _Fallback:
    """State that the blocks of one model share: the limit, and whether it was reached."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit, self.reached = name, limit, False

    def warn(self) -> None:
        if not self.reached:
            self.reached = True
            log_on_main(
                f"warning: {self.name} runs uncompiled from here on, because it would need more than {self.limit} "
                "compiled variants for its rows or blocks; consider removing --torch_compile"
            )


class _CompiledBlock:
    """A callable that `nn.Module` uses in place of a block's forward, once it is compiled."""

    def __init__(self, block: nn.Module, fallback: _Fallback) -> None:
        self._plain: Callable[..., Any] = block._call_impl
        self._compiled: Callable[..., Any] = block._compiled_call_impl  # type: ignore[assignment]
        self._fallback = fallback
        self._is_sharded = any(hasattr(weight, "ds_id") for weight in block.parameters())

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._fallback.reached or any(named.get(name) is not None for name in _CACHES):
            return self._plain(*given, **named)
        if self._is_sharded:
            return self._compiled(*given, **named)
        limits = {"recompile_limit": self._fallback.limit, "fail_on_recompile_limit_hit": True}
        try:
            with torch._dynamo.config.patch(limits):
                return self._compiled(*given, **named)
        except FailOnRecompileLimitHit:
            self._fallback.warn()
            return self._plain(*given, **named)


def check_compiler() -> None:
    """Compile one addition: ThreestepError if this machine cannot (no C++ compiler on a CPU, no Triton on a GPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(lambda numbers: numbers + 1)(torch.zeros(8, device=device))
    except Exception as problem:  # noqa: BLE001 - torch wraps a missing compiler in its backend's error
        reason = getattr(problem, "inner_exception", problem)  # of torch._dynamo's BackendCompilerFailed
        needed = (
            "Triton and a C compiler" if device == "cuda" else ("a C++ compiler, such as g++ (set CXX to choose one)")
        )
        raise ThreestepError(
            f"--torch_compile needs {needed}, but compiling a test addition failed: {first_line(reason)}; install "
            "it, or leave --torch_compile out"
        ) from problem
