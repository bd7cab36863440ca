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
            not is_given or own.load_in_4bit,
            f"{name} applies to --load_in_4bit, which is off; leave {name} out, or add --load_in_4bit",
        )
    if own.quantization is None:
        return
    given = "--load_in_4bit" if own.load_in_4bit else "--load_in_8bit"
    settings = flags.settings
    mistakes.require(
        not (own.load_in_4bit and own.load_in_8bit),
        "--load_in_4bit and --load_in_8bit contradict each other; leave one of them out",
    )
    mistakes.require(
        settings["only_optimize_lora"],
        f"{given} freezes the weights that it quantizes, but --only_optimize_lora false trains them; leave one of "
        "them out",
    )
    for name, rank in adapter_ranks(flags).items():
        mistakes.require(
            rank > 0,
            f"{given} freezes the weights that it quantizes, so only adapters can train, but {name} is {rank}; set a "
            f"rank, such as {name} 16",
        )
    for name, why in [*_others(settings), *flags.guests.exact_weights().items()]:
        mistakes.add(f"{given} does not work with {name}, {why}; leave one of them out")
    if in_place_of_run(settings) is None:  # only a run needs it, not the plan of one
        mistakes.require(
            not own.load_in_4bit or find_spec("bitsandbytes") is not None,
            "--load_in_4bit needs the bitsandbytes package, which is not installed; run pip install bitsandbytes, "
            "or use --load_in_8bit, which needs no extra package",
        )


def _others(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield other flags that are set and do not go with rounded weights, as they are written, and why not."""
    for stage in _STAGES:
        if settings.get(stage) == 3:
            yield f"--{stage} 3", "because quantized weights are not sharded across ranks"
    if settings.get("share_trunk"):
        yield "--share_trunk", "which shares one model's weights between two models"
    if settings["use_dora"]:
        yield "--use_dora", "whose magnitudes are initialized from the norms of the exact weights"
