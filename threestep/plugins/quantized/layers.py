"""Linear layers whose frozen weights are stored in 4 or 8 bits, and made whole again in each forward and backward.

QLoRA (Dettmers et al. 2023, arXiv:2305.14314): the weights of the base are rounded once, adapters in the precision of
the training stand on them, and gradients pass through the rounded weights to the adapters. The 4-bit kinds and their
kernels are bitsandbytes'; its layers are not used. They change their weights on some CPUs in eval mode, and in 8 bits
they round activations too, by the outliers of a whole batch (LLM.int8()): a token's numbers would then depend on its
neighbours in the batch. Here the weights alone are rounded, and the rest is a linear layer of them.

O outputs, I inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from threestep.plugins.quantized.quantization import BLOCK, SCALES_BLOCK, Quantization
from training.utils.models.families import is_beside_language
from training.utils.models.weights import PackedLinear, packed_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuantizedLinear(PackedLinear):
    """A linear layer (or transformers' Conv1D) with a rounded weight that does not train. Its parts are buffers of
    integers, which no cast of a model's precision changes; scales are stored by their bits."""

    kind: ClassVar[str] = "quantized"

    def __init__(self, layer: nn.Module, quantization: Quantization, device: torch.device | None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a weight
        self.transposed = isinstance(layer, Conv1D)
        weight_OI: Any = layer.weight.detach().to(device)  # type: ignore[union-attr, operator]
        weight_OI = weight_OI.t() if self.transposed else weight_OI
        self.out_features, self.in_features = weight_OI.shape
        self.quantization, self.dtype = quantization, weight_OI.dtype
        self.bias = layer.bias  # type: ignore[assignment]
        make = _empty_parts if weight_OI.is_meta else quantized
        for name, part in make(weight_OI, quantization).items():
            self.register_buffer(name, part)
        self.absent = None

    @property
    def form(self) -> str:
        return str(self.quantization)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """See `PackedLinear.whole`."""
        parts: Any = self._buffers
        return dequantized(parts, self.quantization, (self.out_features, self.in_features), dtype)

    def described(self, names: list[str]) -> dict[str, Any]:
        """See `PackedLinear.described`."""
        return {"quantization": asdict(self.quantization), self.kind: names}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _ThroughRounded.apply(input, self)
        return out


class _ThroughRounded(torch.autograd.Function):
    """Saves nothing for the backward, which makes the weight whole once more."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.whole(inputs.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.layer.whole(gradient.dtype), None


@dataclass(frozen=True)
class RoundedLayers:
    """Figures of a rounded model. bytes_before, bytes_after: of all its weights. share: the root mean square of the
    rounding errors, divided by that of the weights."""

    layers: int
    bytes_before: int
    bytes_after: int
    share: float


def quantize_layers(
    model: PreTrainedModel,
    quantization: Quantization,
    device: torch.device | None = None,
    names: Sequence[str] | None = None,
) -> RoundedLayers:
    """Round the weights of linear layers in place, one by one on `device`, where they stay. On the meta device nothing
    is rounded, and the parts have their shapes alone.

    names: of the layers; by default those of `quantizable_layers`
    """
    names = list(quantizable_layers(model)) if names is None else names
    bytes_before = weight_bytes(model)
    moved = total = 0.0
    for name in names:
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(name)
        rounded = QuantizedLinear(layer, quantization, device)
        if not rounded.weight.is_meta:
            exact: Any = layer.weight.detach().to(device)  # type: ignore[union-attr, operator]
            exact = (exact.t() if rounded.transposed else exact).float()
            moved += float((rounded.weight.float() - exact).square().sum())
            total += float(exact.square().sum())
        wrapper: Any = model.get_submodule(owner)
        setattr(wrapper, leaf, rounded)
        if hasattr(wrapper, "fan_in_fan_out"):  # of PEFT's, which adapted a Conv1D
            wrapper.fan_in_fan_out = False
    share = (moved / total) ** 0.5 if total else 0.0
    return RoundedLayers(len(names), bytes_before, weight_bytes(model), share)


def quantizable_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of `model` but its output layer or scalar head, and those that share their weight, belong to
    adapters, are kept in another precision than the model, or are beside the language model."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    is_beside = is_beside_language(model)
    names: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        names[id(weight)] = names.get(id(weight), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and module not in heads
        and ".lora_" not in name
        and names[id(module.weight)] == 1
        and module.weight.dtype == model.dtype
        and not is_beside(name)
    }


def quantize_described(model: PreTrainedModel, facts: Mapping[str, Any]) -> None:
    """Make the layers on meta that `QuantizedLinear.described` described."""
    quantize_layers(model, Quantization(**facts["quantization"]), names=facts[QuantizedLinear.kind])


def quantized(weight_OI: torch.Tensor, quantization: Quantization) -> dict[str, torch.Tensor]:
    """Round a weight; return its parts by name: `packed` and `scale`; of scales that are quantized themselves, also
    `scale_scale`, `scale_offset` and `scale_code`. All are integers; float32 numbers are stored by their bits."""
    if quantization.kind == "int8":
        scale_O = weight_OI.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        packed_OI = (weight_OI.float() / scale_O[:, None]).round_().to(torch.int8)
        return {"packed": packed_OI, "scale": scale_O.view(torch.int32)}
    flat = weight_OI.reshape(-1)
    # Whole blocks: bitsandbytes compiles a kernel for others on a CPU (0.50).
    flat = functional.pad(flat, (0, -len(flat) % BLOCK))
    packed, state = _bitsandbytes().quantize_4bit(
        flat, blocksize=BLOCK, compress_statistics=quantization.double, quant_type=quantization.kind
    )
    parts = {"packed": packed, "scale": state.absmax}
    if quantization.double:
        parts |= {"scale_scale": state.state2.absmax, "scale_offset": state.offset, "scale_code": state.state2.code}
    return {
        name: part.float().contiguous().view(torch.int32) if part.is_floating_point() else part
        for name, part in parts.items()
    }


def dequantized(
    parts: Mapping[str, torch.Tensor], quantization: Quantization, shape_OI: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [O, I] in `dtype` that `quantized` made these parts of."""
    packed, scale = parts["packed"], parts["scale"]
    if packed.is_meta:
        return torch.empty(tuple(shape_OI), dtype=dtype, device="meta")
    with torch.no_grad():
        if quantization.kind == "int8":
            whole_OI = torch.empty(tuple(shape_OI), dtype=dtype, device=packed.device)
            return torch.mul(packed, scale.view(torch.float32)[:, None], out=whole_OI)
        library = _bitsandbytes()
        if quantization.double:
            offset, scale_scale, code = (
                parts[name].view(torch.float32) for name in ("scale_offset", "scale_scale", "scale_code")
            )
            scales = library.dequantize_blockwise(scale, absmax=scale_scale, code=code, blocksize=SCALES_BLOCK) + offset
        else:
            scales = scale.view(torch.float32)
        state = library.QuantState(
            absmax=scales,
            shape=torch.Size((1, packed.numel() * 2)),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type=quantization.kind,
        )
        flat: torch.Tensor = library.dequantize_4bit(packed, state).view(-1)
        return flat[: shape_OI[0] * shape_OI[1]].view(tuple(shape_OI))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes that all weights of `model` take on one rank, as they are stored."""
    rounded = sum(part.nbytes for _, layer in packed_layers(model) for part in layer.buffers())
    return rounded + sum(weight.nbytes for weight in model.parameters())


def _empty_parts(weight_OI: torch.Tensor, quantization: Quantization) -> dict[str, torch.Tensor]:
    """The result of `quantized`, without values."""
    outputs, inputs = weight_OI.shape
    if quantization.kind == "int8":
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "packed": ((outputs, inputs), torch.int8),
            "scale": ((outputs,), torch.int32),
        }
    else:
        blocks = -(-outputs * inputs // BLOCK)
        scale_dtype = torch.uint8 if quantization.double else torch.int32
        shapes = {"packed": ((blocks * BLOCK // 2, 1), torch.uint8), "scale": ((blocks,), scale_dtype)}
        if quantization.double:
            shapes["scale_scale"] = (-(-blocks // SCALES_BLOCK),), torch.int32
            shapes["scale_offset"], shapes["scale_code"] = ((), torch.int32), ((256,), torch.int32)
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}


def _bitsandbytes() -> Any:
    """The functions of bitsandbytes. As it is imported it logs that a package for another kernel is missing."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional as library
    finally:
        logger.setLevel(level)
    return library
