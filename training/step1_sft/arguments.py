"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import RateArguments
from training.utils.flags.added import advice
from training.utils.flags.flags import flag, flag_of

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags


@dataclass
class SftArguments:
    """Supervised fine-tuning."""

    topic: ClassVar[str] = "loss"

    learning_rate: float = flag_of(
        RateArguments, "Peak learning rate; the default is Alpaca's for full fine-tuning.", default=2e-5
    )
    neftune_alpha: float = flag(
        0.0,
        "NEFTune: add uniform noise of size alpha / sqrt(length x width) to the input embeddings in training; 0 "
        "adds none, the paper tries 5, 10 and 15 (Jain et al. 2023).",
        "number >= 0",
    )
    z_loss_coef: float = flag(
        0.0,
        "Weight of the z-loss, which keeps the logits' normalizer near 1; 0 leaves it out, PaLM uses 1e-4 "
        "(Chowdhery et al. 2022).",
        "factor >= 0",
    )
    likelihood_coef: float = flag(
        1.0,
        "Weight of the negative log-likelihood of the data's tokens; 0 trains by a teacher alone.",
        "factor >= 0",
    )


def check_flags(flags: OneModelFlags) -> None:
    """Raise ThreestepError if sequences with noise of their own are to share tokens, or nothing is to train."""
    if not (flags.of_step.likelihood_coef or flags.guests.trains_alone):
        raise ThreestepError(
            "--likelihood_coef 0 leaves the model to a teacher, and there is none; "
            f"{', or '.join([*advice('no_own_loss'), 'leave it out'])}"
        )
    if flags.engine.share_beginnings and flags.of_step.neftune_alpha:
        raise ThreestepError(
            f"--share_beginnings {flags.engine.share_beginnings} computes a token once for several rows, and "
            f"--neftune_alpha {flags.of_step.neftune_alpha:g} gives each row noise of its own; leave one of them out"
        )
