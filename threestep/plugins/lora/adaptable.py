"""The linear layers that cannot have adapters, and why.

A family may read past a layer, `layer.weight @ x` (Jamba's Mamba layers): an adapter on it would do nothing in training
and be merged into the saved model all the same. A weight that two layers share can be merged with one adapter only
(Zamba). And some classes derive from a linear layer and compute something else (routers, grouped projections).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from training.utils.models.own_forward import current_difference, own_forward_of, rms
from training.utils.models.weights import PackedLinear, whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READ_PAST = "the family reads the weight without calling the layer"
SHARED = "the weight is shared with another layer"
NOT_LINEAR = "it is not a plain linear layer"
REFUSED_BY_PEFT = "PEFT refuses it, or treats it as an expert layer"
_CLOSE = 0.02  # of the output's root mean square: rounding in half precision is below, another function far above


def why_no_adapters(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the names of those of `layers`, linear ones of `model`, that cannot have adapters, with the reason.

    Runs a forward or two of short sequences; a collective under ZeRO-3. A model without weights (meta device)
    runs none.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    reasons = {name: REFUSED_BY_PEFT for name in layers if _is_refused_by_peft(model, name)}
    shared = {name for name, layer in layers.items() if uses[id(layer._parameters.get("weight"))] > 1}
    reasons |= dict.fromkeys(shared, SHARED)
    if own_forward_of(model) is None:
        return reasons
    others = {name: layer for name, layer in layers.items() if name not in reasons}
    of_their_own = {
        type(layer)
        for layer in others.values()
        if type(layer) not in (nn.Linear, Conv1D) and not isinstance(layer, PackedLinear)
    }
    is_linear = dict.fromkeys(of_their_own, False)
    with _noting_linear_classes(model, is_linear):
        is_read_past = _moves(model, others)
    reasons |= {name: NOT_LINEAR for name, layer in others.items() if not is_linear.get(type(layer), True)}
    if is_read_past:
        kinds = {name.rpartition(".")[2] for name in others}
        past = {kind for kind in kinds if _moves(model, {n: m for n, m in others.items() if _ends(n, kind)})}
        reasons |= {name: READ_PAST for name in others if name.rpartition(".")[2] in past}
    return reasons


def _is_refused_by_peft(model: PreTrainedModel, name: str) -> bool:
    """True if PEFT cannot adapt the layer: an `out_proj` of Mamba's relatives; or, in families whose experts became one
    tensor in transformers 5, any layer named as an expert's once were (`down_proj`), also those of shared experts and
    dense layers, which it takes for the experts, adding adapters and loading them (peft 0.21)."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        _check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # a part of what it fuses
        return True
    return bool(config.target_parameters)


def _ends(name: str, kind: str) -> bool:
    return name.rpartition(".")[2] == kind


def _moves(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> bool:
    """True if the model's numbers change when the layers' weights are NaN for all but the layers' forwards."""
    measured = own_forward_of(model)
    assert measured is not None
    try:
        return (
            not current_difference(model, measured, inside=lambda: _weights_in_calls_alone(layers))
            <= measured.tolerance
        )
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - NaN breaks each family in its own way
        return True


@contextlib.contextmanager
def _weights_in_calls_alone(layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, the weight of each layer is NaN (without memory for it), but for the layer's own forward."""

    def swap(layer: nn.Module, weight: nn.Parameter) -> None:
        layer._parameters["weight"] = weight

    with contextlib.ExitStack() as undo:
        for layer in layers.values():
            if isinstance(layer, PackedLinear):
                device = next(layer.buffers()).device
                absent = torch.full((), torch.nan, dtype=layer.dtype, device=device)
                layer.absent = absent.expand(layer.out_features, layer.in_features)
                undo.callback(setattr, layer, "absent", None)
                continue
            weight: Any = layer.weight
            nan = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device)
            absent = nn.Parameter(nan.expand(whole_shape(weight)), requires_grad=False)
            before = layer.register_forward_pre_hook(lambda layer, inputs, weight=weight: swap(layer, weight))
            after = layer.register_forward_hook(
                lambda layer, inputs, output, absent=absent: swap(layer, absent), always_call=True
            )
            undo.callback(before.remove)
            undo.callback(after.remove)
            undo.callback(swap, layer, weight)
            swap(layer, absent)
        yield


@contextlib.contextmanager
def _noting_linear_classes(model: PreTrainedModel, is_linear: dict[type, bool]) -> Iterator[None]:
    """Inside, a forward of `model` sets `is_linear` of each class that returns a linear layer's output."""

    def compare(layer: Any, inputs: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor) or whole_shape(layer.weight)[0] != output.shape[-1]:
            is_linear[type(layer)] = False
            return
        expected = functional.linear(inputs[0].to(layer.weight.dtype), layer.weight, layer.bias).double()
        is_linear[type(layer)] = rms(output.double() - expected) <= _CLOSE * rms(expected)

    with contextlib.ExitStack() as hooks:
        for layer in model.modules():
            if type(layer) in is_linear:
                hooks.callback(layer.register_forward_hook(compare).remove)
        yield
