"""Layer inputs in host memory: with gradient checkpointing all that a layer keeps for its backward.

`checkpoint` saves a layer's input as autograd saves tensors, so that hooks on saved tensors reach it (as torch's
`save_on_cpu`), and what the layer saves inside is not reached. Copies to pinned memory and back are queued behind the
stream's work: exact, without a wait of the host, and not beside computation.

N rows, T tokens in a row (or a slice of it), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from torch import nn

FLAG = "--activation_offload"


def check_offloads(is_cuda: bool) -> None:
    """ThreestepError on a CPU."""
    if not is_cuda:
        raise ThreestepError(
            f"{FLAG} moves layer inputs from GPU memory to host memory, which does nothing on a CPU; remove {FLAG}"
        )


def offload_inputs(model: nn.Module) -> None:
    """Keep the inputs of the layers that `model` computes again in the host's memory, in place."""
    layers = [
        part for part in model.modules() if isinstance(part, GradientCheckpointingLayer) and part.gradient_checkpointing
    ]
    for layer in layers:
        recompute: Any = layer._gradient_checkpointing_func
        if not isinstance(recompute, OffloadedInput):
            layer._gradient_checkpointing_func = OffloadedInput(recompute)
    log_on_main(f"{type(model).__name__}: inputs of {len(layers)} layers are kept in host memory for the backward pass")


class OffloadedInput:
    """transformers' function of gradient checkpointing, `recompute`, with the layer's input [N, T, H] on the host."""

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute

    def __call__(self, layer: Callable[..., Any], hidden_NTH: torch.Tensor, *others: Any) -> Any:
        place, shape, device = hidden_NTH.data_ptr(), hidden_NTH.shape, hidden_NTH.device

        def pack(saved: torch.Tensor) -> torch.Tensor:
            if saved.data_ptr() != place or saved.shape != shape:  # a mask, which all layers share
                return saved
            kept = torch.empty_like(saved, device="cpu", pin_memory=device.type == "cuda")
            return kept.copy_(saved, non_blocking=True)

        def unpack(kept: torch.Tensor) -> torch.Tensor:
            return kept.to(device, non_blocking=True)

        with saved_tensors_hooks(pack, unpack):
            return self.recompute(layer, hidden_NTH, *others)
