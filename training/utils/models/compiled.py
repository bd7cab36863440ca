"""torch.compile for a model's blocks.

Each block is compiled separately, as in torchtitan: blocks share their code, so that one compilation is enough, and
gradient checkpointing, LoRA and ZeRO-3's gathering of weights work around and inside of them.
"""

from __future__ import annotations

import torch
from torch import nn

from training.utils.run.errors import ThreestepError, first_line


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Compile every transformer block of `model` in place (the whole model if transformers marks no blocks); return how
    many. Rows may have any width; compilation happens at the first forward.

    The compiled forward equals the plain one up to rounding. Names of weights do not change.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)] or [model]
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    return len(blocks)


def check_compiler() -> None:
    """Compile one addition: ThreestepError if this machine cannot (no C++ compiler on a CPU, no Triton on a GPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(lambda numbers: numbers + 1)(torch.zeros(8, device=device))
    except Exception as problem:  # noqa: BLE001 - torch wraps a missing compiler in an error of its own backend
        reason = getattr(problem, "inner_exception", problem)  # of torch._dynamo's BackendCompilerFailed
        needed = "Triton and a C compiler" if device == "cuda" else "a C++ compiler, such as g++ (CXX may name one)"
        raise ThreestepError(
            f"--torch_compile needs {needed}, and compiling one addition failed here: {first_line(reason)}; install "
            "it or leave --torch_compile out"
        ) from problem
