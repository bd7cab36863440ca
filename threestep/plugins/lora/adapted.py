"""PEFT's LoRA on a model, as the core asks for it (`models.weights`): names, merged weights, adapters off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.contracts.lending import LowRank
from training.utils.models.weights import Adapters, mark_adapted, packed_layers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

ADAPTER = "default"
_BASE = ".base_layer.weight"  # the end of the name of an adapted weight


@dataclass(frozen=True)
class LoraAdapters(Adapters):
    """See `Adapters`."""

    learning_rate: float | None = None

    def holds(self, name: str) -> bool:
        """See `Adapters.holds`."""
        return ".lora_" in name

    def plain_name(self, name: str) -> str:
        """See `Adapters.plain_name`."""
        return name.replace(".base_layer.", ".")

    def parameters_of(self, model: nn.Module, name: str) -> list[nn.Parameter]:
        """See `Adapters.parameters_of`."""
        own = model.get_parameter(name)
        if not name.endswith(_BASE):
            return [own]
        layer = model.get_submodule(name.removesuffix(_BASE))
        return [own, *(part for part_name, part in layer.named_parameters() if self.holds("." + part_name))]

    def merged(self, model: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
        """See `Adapters.merged`."""
        if not name.endswith(_BASE):
            return weight
        layer: Any = model.get_submodule(name.removesuffix(_BASE))
        moved = weight + layer.get_delta_weight(ADAPTER).to(weight.dtype)
        if ADAPTER not in layer.lora_magnitude_vector:
            return moved
        # DoRA, equation 5: each output's weights have the length of its magnitude.
        along = 0 if layer.fan_in_fan_out else 1
        factors = layer.lora_magnitude_vector[ADAPTER].weight / moved.norm(dim=along)
        return moved * factors.to(weight.dtype).unsqueeze(along)

    def train_alone(self, model: nn.Module) -> bool:
        """See `Adapters.train_alone`."""
        learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        has_others = any(".lora_A." not in name and ".lora_B." not in name for name in learned)
        return bool(learned) and not has_others and not any(packed_layers(model))

    def low_rank(self, model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], LowRank]]]:
        """See `Adapters.low_rank`."""
        for name, layer in adapter_layers(model):
            own = [part for part_name, part in layer.named_parameters() if ".base_layer" not in f".{part_name}"]
            yield f"{name}.weight", own, partial(_low_rank, layer)

    @contextlib.contextmanager
    def off(self, model: nn.Module) -> Iterator[None]:
        """See `Adapters.off`.

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

    def describe(self, model: PreTrainedModel, folder: Path) -> None:
        """See `Adapters.describe`."""
        model.peft_config[ADAPTER].save_pretrained(folder)  # type: ignore[attr-defined]  # PEFT's

    def save(self, model: PreTrainedModel, folder: Path, base: Path) -> None:
        """Write them in PEFT's format."""
        model.peft_config[ADAPTER].base_model_name_or_path = str(base)  # type: ignore[attr-defined]  # PEFT's
        model.save_pretrained(str(folder))


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers with adapters, by name."""
    return [(name, layer) for name, layer in model.named_modules() if ADAPTER in getattr(layer, "lora_A", ())]


def mark_layers(model: nn.Module, learning_rate: float | None = None) -> None:
    """Have the core find the adapters on these layers."""
    for _, layer in adapter_layers(model):
        mark_adapted(layer, LoraAdapters(learning_rate))


def _low_rank(layer: Any) -> LowRank:
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return LowRank(down.detach(), up.detach(), float(layer.scaling[ADAPTER]), bool(layer.fan_in_fan_out))
