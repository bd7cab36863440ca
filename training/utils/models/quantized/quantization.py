"""Settings of quantized base weights under LoRA (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). Cheap to import."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

FOUR_BIT_KINDS = ("nf4", "fp4")
BLOCK = 64  # weights that share a scale, in 4 bits
SCALES_BLOCK = 256  # scales that share a scale, if they are quantized themselves

NOT_SHARDED = "as rounded weights are whole on every rank"


@dataclass(frozen=True)
class Quantization:
    """kind: nf4 or fp4, 4 bits with a scale for each 64 weights; or int8, with a scale for each output.
    double: the scales of the 4-bit kinds are quantized themselves, to 8 bits.
    """

    kind: str
    double: bool = False

    def __str__(self) -> str:
        return f"{self.kind} with quantized scales" if self.double else self.kind


class QuantizationFlags(Protocol):
    """The flags of quantization, as every step has them."""

    load_in_4bit: bool
    load_in_8bit: bool
    bnb_4bit_quant_type: str
    bnb_4bit_use_double_quant: bool
    only_optimize_lora: bool


def check_quantization(mistakes: Mistakes, flags: QuantizationFlags) -> None:
    """Note what contradicts itself in `flags`."""
    for name, is_given in {
        f"--bnb_4bit_quant_type {flags.bnb_4bit_quant_type}": flags.bnb_4bit_quant_type != FOUR_BIT_KINDS[0],
        "--bnb_4bit_use_double_quant": flags.bnb_4bit_use_double_quant,
    }.items():
        mistakes.require(
            not is_given or flags.load_in_4bit, f"{name} is of --load_in_4bit, which is off; leave it out or give both"
        )
    flag = _flag_given(flags)
    if flag is None:
        return
    mistakes.require(
        not (flags.load_in_4bit and flags.load_in_8bit),
        "--load_in_4bit and --load_in_8bit both say how many bits a weight takes; leave one of them out",
    )
    mistakes.require(
        flags.only_optimize_lora,
        f"{flag} freezes the weights that it rounds, and --only_optimize_lora false trains them; leave one of them out",
    )


def check_ranks(mistakes: Mistakes, flags: QuantizationFlags, ranks: Mapping[str, int]) -> None:
    """Note models without adapters, whose weights would all be rounded and frozen. ranks: of the adapters, by flag"""
    flag = _flag_given(flags)
    for name, rank in ranks.items():
        mistakes.require(
            flag is None or rank > 0,
            f"{flag} freezes the weights that it rounds, and {name} is {rank}; give {name} a rank, such as 16, so "
            "that adapters train",
        )


def check_beside_quantization(mistakes: Mistakes, flags: QuantizationFlags, others: Mapping[str, str | None]) -> None:
    """Note other flags that quantized weights cannot go with.

    others: why not, by flag as it is written; None for a flag that is not given
    """
    flag = _flag_given(flags)
    for name, why in others.items():
        mistakes.require(flag is None or why is None, f"{flag} cannot go with {name}, {why}; leave one of the two out")


def check_package(mistakes: Mistakes, flags: QuantizationFlags) -> None:
    """Note that the package is missing. Only a run needs it, not the plan of one."""
    mistakes.require(
        not flags.load_in_4bit or importlib.util.find_spec("bitsandbytes") is not None,
        "--load_in_4bit needs the package bitsandbytes, which is not installed; run: pip install bitsandbytes, or give "
        "--load_in_8bit, which needs no package",
    )


def _flag_given(flags: QuantizationFlags) -> str | None:
    if flags.load_in_4bit:
        return "--load_in_4bit"
    return "--load_in_8bit" if flags.load_in_8bit else None
