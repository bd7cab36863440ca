"""LoRA by PEFT: adapters added to a model in place, and its merged weights.

A model with adapters keeps its class, so other rooms treat it like any model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.rollout_engine import LowRank

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings

ADAPTER = "default"
END_OF_NAME = "$"  # behind a part: the layer's name is it, or ends with a dot and it


def add_lora(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """Add adapters of rank `lora_dim` to `model` in place (none if it is 0) and return it. Adapters that it has already
    are these, trained on, but for their dropout.

    `lora_module_name` is "all-linear" (every linear layer but the head) or parts of the names of the layers, separated
    by commas, each the end of a name where a $ is behind it. Of a model that reads more than text these are layers of
    the language model, but for a part that only names of its tower or projector have. With `only_optimize_lora` all
    other weights are frozen, except a scalar head.
    """
    if settings.lora_dim == 0:
        return model
    if ADAPTER in getattr(model, "peft_config", {}):
        _set_lora_dropout(model, settings.lora_dropout)
    else:
        _add_adapters(model, settings)
    for name, parameter in model.named_parameters():
        if not settings.only_optimize_lora or name.startswith("score."):
            parameter.requires_grad_(True)
    return model


def _add_adapters(model: PreTrainedModel, settings: ModelSettings) -> None:
    from peft import LoraConfig

    part = settings.lora_module_name
    config = LoraConfig(
        r=settings.lora_dim,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # a float serves: the scale is alpha / r
        lora_dropout=settings.lora_dropout,
        # PEFT's own "all-linear" also wraps the weights of experts and routers, which are no layers (peft 0.21).
        use_dora=settings.use_dora,
        target_modules=_layers_named(model, [""] if part == "all-linear" else part.split(",")),
    )
    try:
        model.add_adapter(config, adapter_name=ADAPTER)
    except ValueError as problem:
        raise ThreestepError(
            f"--lora_dim: PEFT makes no adapters for {type(model).__name__} here: {first_line(problem)}; name other "
            "layers with --lora_module_name, or train without LoRA"
        ) from problem


def _set_lora_dropout(model: PreTrainedModel, rate: float) -> None:
    import torch
    from peft.tuners.lora import LoraLayer

    model.peft_config[ADAPTER].lora_dropout = rate  # type: ignore[attr-defined]  # PEFT's
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout[ADAPTER] = torch.nn.Dropout(rate) if rate else torch.nn.Identity()


def is_adapter_tensor(name: str) -> bool:
    """True if LoRA added the tensor of this name."""
    return ".lora_" in name


def merged_name(name: str) -> str:
    """Return a weight's name in the plain model."""
    return name.replace(".base_layer.", ".")


def with_adapter(model: torch.nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight called `name`, which is `weight`, with its adapter merged. Under ZeRO-3, gather
    `layer_parameters` first."""
    if not name.endswith(".base_layer.weight"):
        return weight
    layer: Any = model.get_submodule(name.removesuffix(".base_layer.weight"))
    moved = weight + layer.get_delta_weight(ADAPTER).to(weight.dtype)
    if ADAPTER not in layer.lora_magnitude_vector:
        return moved
    # DoRA, equation 5: each output's weights have the length of its magnitude.
    along = 0 if layer.fan_in_fan_out else 1
    factors = layer.lora_magnitude_vector[ADAPTER].weight / moved.norm(dim=along)
    return moved * factors.to(weight.dtype).unsqueeze(along)


def adapter_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the layers with adapters, by name."""
    return [(name, layer) for name, layer in model.named_modules() if ADAPTER in getattr(layer, "lora_A", ())]


def low_rank(layer: Any) -> LowRank:
    """Return a layer's adapters. Under ZeRO-3, gather them first."""
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return LowRank(down.detach(), up.detach(), float(layer.scaling[ADAPTER]), bool(layer.fan_in_fan_out))


def trains_adapters_alone(model: torch.nn.Module) -> bool:
    """Return whether nothing but adapters that `low_rank` describes is trained."""
    from training.utils.models.tensors.packed import packed_layers

    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    has_others = any(".lora_A." not in name and ".lora_B." not in name for name in learned)
    return bool(learned) and not has_others and not any(packed_layers(model))


def layer_parameters(model: torch.nn.Module, name: str) -> list[torch.nn.Parameter]:
    """Return the parameters that make up the merged weight called `name`: itself and its adapters."""
    own = model.get_parameter(name)
    if not name.endswith(".base_layer.weight"):
        return [own]
    layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
    adapters = [part for part_name, part in layer.named_parameters() if is_adapter_tensor("." + part_name)]
    return [own, *adapters]


def _layers_named(model: PreTrainedModel, parts: Sequence[str]) -> list[str]:
    """Return the names of the linear layers to adapt; those left out are noted with the model's own forward."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from training.utils.models.adapters.adaptable import why_no_adapters
    from training.utils.models.own_forward import own_forward_of

    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module not in heads
    }
    lacking = [part for part in parts if not any(_is_named(name, part) for name in found)]
    named = _in_language(model, found, parts)
    found = {name: module for name, module in found.items() if name in named}
    if lacking or not found:
        raise ThreestepError(
            f"--lora_module_name expects 'all-linear' or a part of the names of linear layers in "
            f"{type(model).__name__}, such as 'layers.', got '{','.join(lacking)}'"
        )
    reasons = why_no_adapters(model, found)
    left = [name for name in found if name not in reasons]
    notes = [_in_words(reason, [name for name in reasons if reasons[name] == reason]) for reason in {*reasons.values()}]
    if not left:
        raise ThreestepError(
            f"--lora_module_name '{','.join(parts)}': {'; '.join(notes)}; name other layers of "
            f"{type(model).__name__}, or train without LoRA"
        )
    own = own_forward_of(model)
    if own is not None:
        own.notes.extend(sorted(notes))
    return left


def _in_language(model: PreTrainedModel, names: Collection[str], parts: Sequence[str]) -> set[str]:
    """Return the names that hold one of `parts`: in the language model, and of a tower or projector where a part is of
    no name in the language model."""
    from training.utils.models.families.parts import is_beside_language

    is_beside, found = is_beside_language(model), set[str]()
    for part in parts:
        named = {name for name in names if _is_named(name, part)}
        found |= {name for name in named if not is_beside(name)} or named
    return found


def _is_named(name: str, part: str) -> bool:
    return f".{name}".endswith(f".{part[:-1]}") if part.endswith(END_OF_NAME) else part in name


def _in_words(reason: str, names: list[str]) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in names})
    layers = "1 layer" if len(names) == 1 else f"{len(names)} layers"
    return f"no adapters on {layers} ({', '.join(kinds[:6])}): {reason}"


@contextlib.contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` computes without its adapters.

    PEFT's switch also toggles requires_grad, which breaks DeepSpeed's hooks on parameters; the flag that it sets is
    enough (peft 0.21, tuners_utils.BaseTunerLayer).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
