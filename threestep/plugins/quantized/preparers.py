"""The rounding of a model's base weights as it is loaded. Cheap to import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.quantized.arguments import QuantizationArguments
from training.utils.base.console import log_on_main
from training.utils.models.settings import ModelPreparer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from threestep.plugins.quantized.quantization import Quantization
    from training.utils.flags.added import AddedFlags


def preparers(added: AddedFlags, role: str) -> Iterator[ModelPreparer]:
    """Yield what these flags change in models (`Hooks.preparers`)."""
    quantization = added.of(QuantizationArguments).quantization
    if quantization is not None:
        yield RoundedWeights(quantization)


@dataclass(frozen=True)
class RoundedWeights(ModelPreparer):
    """Base weights that are rounded layer by layer. The model has not been on its device as a whole: it may not fit
    there."""

    quantization: Quantization
    of_counted: ClassVar[bool] = True
    places_parts: ClassVar[bool] = True

    @property
    def weights_form(self) -> str:
        return str(self.quantization)

    def before_device(self, model: PreTrainedModel, device: torch.device | None) -> None:
        """Round the weights, and log which."""
        from threestep.plugins.quantized.layers import quantize_layers

        done = quantize_layers(model, self.quantization, device)
        if model.device.type == "meta":
            return
        dtype = str(model.dtype).removeprefix("torch.")
        before, after = done.bytes_before / 2**20, done.bytes_after / 2**20
        log_on_main(
            f"model: {done.layers} linear layers are stored in {self.quantization}, all other weights in {dtype}: "
            f"the base model takes {after:,.1f} MiB instead of {before:,.1f}; quantization changes the layers' "
            f"weights by {done.share:.2%} (root mean square), and saved models have the quantized weights in "
            f"{dtype}"
        )
