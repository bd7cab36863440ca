"""LoRA by PEFT: adapters put into a model in place, and the merged weights read back out.

A model with adapters keeps its class, so every other room treats it as the model it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from training.utils.run.errors import ThreestepError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings

ADAPTER = "default"


def add_lora(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """Put adapters of rank `lora_dim` into `model` in place (nothing where it is 0) and return it.

    `lora_module_name` is "all-linear" (every linear layer but the head) or a part of the names of the layers to
    adapt. Unless `only_optimize_lora` is off, all other weights are frozen; a scalar head always trains.
    """
    if settings.lora_dim == 0:
        return model
    from peft import LoraConfig

    targets: str | list[str] = settings.lora_module_name
    if targets != "all-linear":
        targets = _linear_layers_named(model, settings.lora_module_name)
    model.add_adapter(
        LoraConfig(
            r=settings.lora_dim,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # a float serves: the scale is alpha / r
            lora_dropout=settings.lora_dropout,
            target_modules=targets,
            exclude_modules=["score"] if hasattr(model, "score") else None,
        ),
        adapter_name=ADAPTER,
    )
    for name, parameter in model.named_parameters():
        if not settings.only_optimize_lora or name.startswith("score."):
            parameter.requires_grad_(True)
    return model


def is_adapter_tensor(name: str) -> bool:
    """True for the name of a tensor that LoRA added."""
    return ".lora_" in name


def merged_name(name: str) -> str:
    """The name a weight has in the plain model."""
    return name.replace(".base_layer.", ".")


def lora_delta(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    """What LoRA adds to the weight called `name`, or None where it adds nothing.

    Under ZeRO-3 the layer's own parameters must be gathered by the caller (`layer_parameters`).
    """
    if not name.endswith(".base_layer.weight"):
        return None
    layer: Any = model.get_submodule(name.removesuffix(".base_layer.weight"))
    return layer.get_delta_weight(ADAPTER)


def layer_parameters(model: torch.nn.Module, name: str) -> list[torch.nn.Parameter]:
    """The parameters that make up the merged weight called `name`: itself, and its adapters'."""
    own = model.get_parameter(name)
    if not name.endswith(".base_layer.weight"):
        return [own]
    layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
    adapters = [part for part_name, part in layer.named_parameters() if is_adapter_tensor("." + part_name)]
    return [own, *adapters]


def _linear_layers_named(model: PreTrainedModel, part: str) -> list[str]:
    import torch
    from transformers.pytorch_utils import Conv1D

    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and part in name and not name.endswith(("lm_head", "score"))
    ]
    if not found:
        raise ThreestepError(
            f"--lora_module_name '{part}' is part of no linear layer's name in {type(model).__name__}; "
            "use 'all-linear' or a part of a name such as 'layers.'"
        )
    return found


@contextlib.contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` computes as if it had no adapters.

    PEFT's own switch also turns requires_grad off and on, which the hooks that DeepSpeed puts on parameters do not
    survive; the flag it sets is enough (peft 0.21, tuners_utils.BaseTunerLayer).
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
