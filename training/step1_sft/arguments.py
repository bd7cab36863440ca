"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.step1_sft.regularizer import regularizer_of
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import RateArguments
from training.utils.flags.flags import flag_of

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags


@dataclass
class SftArguments:
    """Supervised fine-tuning."""

    topic: ClassVar[str] = "loss"

    learning_rate: float = flag_of(
        RateArguments, "Peak learning rate; the default is Alpaca's for full fine-tuning.", default=2e-5
    )


def check_flags(flags: OneModelFlags) -> None:
    """Raise ThreestepError if sequences would share tokens that the regularizer makes different."""
    why_not = regularizer_of(flags.added).why_not_shared
    if flags.engine.share_beginnings and why_not:
        raise ThreestepError(
            f"--share_beginnings {flags.engine.share_beginnings} computes shared tokens once for several "
            f"rows, but {why_not}; remove one of them"
        )
