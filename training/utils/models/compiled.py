"""torch.compile for a model's blocks.

Each block is compiled by itself (as torchtitan does): all blocks share their code, so that one compilation serves
them all, and gradient checkpointing, LoRA, and ZeRO-3's gathering of each module's weights go on around and in them.
"""

from __future__ import annotations

import torch
from torch import nn

from training.utils.run.errors import ThreestepError


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the forward of every transformer block of `model` in place, or of the whole where it has none that
    transformers marks; return how many modules. Rows may have any width. Nothing is compiled before the first forward.

    The compiled forward computes what the plain one does up to rounding; names of weights stay as they are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[nn.Module] = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    blocks = blocks or [model]
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    return len(blocks)


def check_compiler() -> None:
    """Compile one addition: ThreestepError where this machine cannot (no C++ compiler on a CPU, no Triton on a GPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(_plus_one)(torch.zeros(8, device=device))
    except Exception as problem:  # noqa: BLE001 - torch wraps a missing compiler in an error of its own backend
        needed = "Triton and a C compiler" if device == "cuda" else "a C++ compiler, such as g++ (CXX may name one)"
        raise ThreestepError(
            f"--torch_compile needs {needed}, and compiling one addition failed here: {_reason(problem)}; install "
            "it or leave --torch_compile out"
        ) from problem


def _plus_one(numbers: torch.Tensor) -> torch.Tensor:
    return numbers + 1


def _reason(problem: BaseException) -> str:
    problem = getattr(problem, "inner_exception", problem)  # what torch._dynamo's BackendCompilerFailed is about
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
