"""The forms of quantized base weights under LoRA (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass

FOUR_BIT_KINDS = ("nf4", "fp4")
BLOCK = 64  # weights that share a scale, in 4 bits
SCALES_BLOCK = 256  # scales that share a scale, if they are quantized themselves


@dataclass(frozen=True)
class Quantization:
    """kind: nf4 or fp4, 4 bits with a scale for each 64 weights; or int8, with a scale for each output.
    double: the scales of the 4-bit kinds are quantized themselves, to 8 bits.
    """

    kind: str
    double: bool = False

    def __str__(self) -> str:
        return f"{self.kind} with quantized scales" if self.double else self.kind
