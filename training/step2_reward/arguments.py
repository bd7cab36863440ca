"""The flags of step 2 that no other step has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import RateArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.preference.arguments import PairLossArguments

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.setup.flags import OneModelFlags


LOSS_FROM = ("end", "first_difference")


@dataclass
class RewardModelArguments:
    """The reward model."""

    topic: ClassVar[str] = "loss"

    learning_rate: float = flag_of(
        RateArguments, "Peak learning rate (Llama 2's reward models: 5e-6 to 1e-5, Touvron et al. 2023)."
    )
    new_head: bool = flag(
        False,
        "Replace the head of a reward model if it is not named score.weight, and train the new one. A language model "
        "gets a new head even without this flag.",
        topic="model",
    )
    loss_from: str = flag(
        "end",
        "Scores that the loss compares: at the 'end' of both responses, or at all tokens from the 'first_difference' "
        "on (DeepSpeed-Chat's loss, averaged over these tokens). Evaluation and step 3 always use the end.",
        choices=LOSS_FROM,
    )
    margin_scale: float = flag(
        0.0,
        "Factor for the margin by which a row's chosen response should beat the rejected one (--margin_column, or a "
        "dataset class's get_margin; Llama 2, equation 2); 0 ignores margins.",
        "factor >= 0",
    )
    label_smoothing: float = flag_of(PairLossArguments)
    center_coef: float = flag(
        0.0,
        "Weight of (chosen score + rejected score)^2, which keeps scores near 0 (Eisenstein et al. 2023 use 0.01); 0 "
        "disables it.",
        "factor >= 0",
    )
    normalization_rows: int = flag(
        1024,
        "After training, score the chosen responses of this many training rows and store the scores' mean and "
        "standard deviation in the model's configuration, for step 3's --normalize_reward_scores; 0 disables this.",
        "rows >= 0",
    )


def check_margins(rows: Sequence[ResponsesRow], reward: RewardModelArguments) -> None:
    """Raise ThreestepError if the loss needs margins and no row has one."""
    if reward.margin_scale > 0 and all(row.margins is None for row in rows):
        raise ThreestepError(
            f"--margin_scale {reward.margin_scale:g} needs margins, but no training row has one; name the margin "
            "column with --margin_column, or add get_margin to the dataset class"
        )


def check_sharing(flags: OneModelFlags) -> None:
    """Raise ThreestepError if responses whose tokens are compared one by one may share tokens."""
    if flags.engine.share_beginnings and flags.of_step.loss_from == "first_difference":
        raise ThreestepError(
            "--loss_from first_difference needs whole responses, but --share_beginnings "
            f"{flags.engine.share_beginnings} may split them after a shared beginning; remove one of them"
        )
