"""The flags of step 2 that no other step has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.utils.run.errors import ThreestepError
from training.utils.run.flags import flag

if TYPE_CHECKING:
    from training.utils.data.rows.phases import ResponsesRow


LOSS_FROM = ("end", "first_difference")


@dataclass
class RewardModelArguments:
    """The reward model."""

    learning_rate: float = flag(
        1e-5, "Peak learning rate (Llama 2's reward models: 5e-6 to 1e-5, Touvron et al. 2023).", above=0
    )
    loss_from: str = flag(
        "end",
        "Which scores of a pair are compared: those at the 'end' of both responses, or at all tokens from the "
        "'first_difference' on, by the mean of their losses (DeepSpeed-Chat's). Evaluation and step 3 read the end in "
        "both cases.",
        choices=LOSS_FROM,
    )
    margin_scale: float = flag(
        0.0,
        "Train chosen to beat rejected by this many times the row's margin (--margin_column, or get_margin "
        "of a dataset class; Llama 2, equation 2); 0 reads no margins.",
        least=0,
    )
    label_smoothing: float = flag(
        0.0,
        "Share of the pairs held to be labelled the wrong way round; at 0.5 no order is left to learn.",
        least=0,
        below=0.5,
    )
    center_coef: float = flag(
        0.0, "Weight of (better + worse)^2, which holds scores near 0 (Eisenstein et al. 2023 use 0.01).", least=0
    )
    normalization_rows: int = flag(
        1024,
        "After training, the chosen responses of so many training rows are scored; the mean and standard "
        "deviation go into the model's configuration, for step 3's --normalize_reward_scores. 1,024 rows give the "
        "mean to a 32nd of the standard deviation, in a fraction of the time of training on them. 0 stores none.",
        least=0,
    )


def check_margins(rows: Sequence[ResponsesRow], reward: RewardModelArguments) -> None:
    """Raise ThreestepError if margins are to be trained with and no row has any."""
    if reward.margin_scale > 0 and all(row.margins is None for row in rows):
        raise ThreestepError(
            f"--margin_scale {reward.margin_scale:g} needs margins and no training row has one: name their column with "
            "--margin_column, or give the dataset class a get_margin"
        )
