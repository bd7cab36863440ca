"""Refusals of what rounded base weights cannot go with, before a model loads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from threestep.plugins.lora.checks import adapter_ranks
from threestep.plugins.quantized.arguments import QuantizationArguments
from threestep.plugins.quantized.quantization import FOUR_BIT_KINDS
from training.utils.flags.added import in_place_of_run

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_STAGES = ("zero_stage", "actor_zero_stage", "critic_zero_stage")


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note what these flags do not go with (`Hooks.check`)."""
    own: QuantizationArguments = flags.added.of(QuantizationArguments)
    for name, is_given in {
        f"--bnb_4bit_quant_type {own.bnb_4bit_quant_type}": own.bnb_4bit_quant_type != FOUR_BIT_KINDS[0],
        "--bnb_4bit_use_double_quant": own.bnb_4bit_use_double_quant,
    }.items():
        mistakes.require(
            not is_given or own.load_in_4bit, f"{name} is for --load_in_4bit, which is off; leave it out or give both"
        )
    if own.quantization is None:
        return
    given = "--load_in_4bit" if own.load_in_4bit else "--load_in_8bit"
    settings = flags.settings
    mistakes.require(
        not (own.load_in_4bit and own.load_in_8bit),
        "--load_in_4bit and --load_in_8bit both say how many bits a weight takes; leave one of them out",
    )
    mistakes.require(
        settings["only_optimize_lora"],
        f"{given} freezes the weights that it rounds, and --only_optimize_lora false trains them; leave one of them "
        "out",
    )
    for name, rank in adapter_ranks(flags).items():
        mistakes.require(
            rank > 0,
            f"{given} freezes the weights that it rounds, and {name} is {rank}; give {name} a rank, such as 16, so "
            "that adapters train",
        )
    for name, why in [*_others(settings), *flags.guests.exact_weights().items()]:
        mistakes.add(f"{given} cannot go with {name}, {why}; leave one of the two out")
    if in_place_of_run(settings) is None:  # only a run needs it, not the plan of one
        mistakes.require(
            not own.load_in_4bit or find_spec("bitsandbytes") is not None,
            "--load_in_4bit needs the package bitsandbytes, which is not installed; run: pip install bitsandbytes, or "
            "give --load_in_8bit, which needs no package",
        )


def _others(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield other flags that are set and do not go with rounded weights, as they are written, and why not."""
    for stage in _STAGES:
        if settings.get(stage) == 3:
            yield f"--{stage} 3", "as rounded weights are whole on every rank"
    if settings.get("share_trunk"):
        yield "--share_trunk", "which lends one model's weights to two"
    if settings["use_dora"]:
        yield "--use_dora", "whose magnitudes start as norms of the weights that it rounds"
