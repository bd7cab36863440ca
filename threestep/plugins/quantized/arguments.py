"""The flags of quantized base weights. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from threestep.plugins.quantized.quantization import FOUR_BIT_KINDS, Quantization
from training.utils.flags.flags import flag


@dataclass
class QuantizationArguments:
    """The form of the base weights under LoRA, of all models that a step trains."""

    topic: ClassVar[str] = "lora"

    load_in_4bit: bool = flag(
        False, "With LoRA: store the linear layers' frozen weights in 4 bits (QLoRA), using the bitsandbytes package."
    )
    load_in_8bit: bool = flag(False, "With LoRA: store the linear layers' frozen weights in 8 bits.")
    bnb_4bit_quant_type: str = flag(
        "nf4",
        "4-bit format: nf4, designed for normally distributed weights, or fp4, a 4-bit float.",
        "name",
        choices=FOUR_BIT_KINDS,
    )
    bnb_4bit_use_double_quant: bool = flag(
        False, "Also quantize the scales of the 4-bit weights: 4.13 bits per weight instead of 4.5."
    )

    @property
    def quantization(self) -> Quantization | None:
        """The form that the base weights are rounded to, or None."""
        if self.load_in_4bit:
            return Quantization(self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant)
        return Quantization("int8") if self.load_in_8bit else None
