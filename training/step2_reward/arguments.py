"""The flags of step 2 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes


@dataclass
class RewardArguments:
    """The reward model."""

    learning_rate: float = field(
        default=1e-5,
        metadata={"help": "Peak learning rate (Llama 2's reward models: 5e-6 to 1e-5, Touvron et al. 2023)."},
    )
    margin_scale: float = field(
        default=0.0,
        metadata={
            "help": "Train chosen to beat rejected by this many times the row's margin (--margin_column, or get_margin "
            "of a dataset class; Llama 2, equation 2); 0 reads no margins."
        },
    )
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "Share of the pairs held to be labelled the wrong way round, from 0 to below 0.5."},
    )
    center_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of (better + worse)^2, which holds scores near 0 (Eisenstein et al. 2023 use 0.01)."},
    )
    normalization_rows: int = field(
        default=1024,
        metadata={
            "help": "After training, the chosen responses of so many training rows are scored; the mean and standard "
            "deviation go into the model's configuration, for step 3's --normalize_reward_scores. 1,024 rows give the "
            "mean to a 32nd of the standard deviation, in a fraction of the time of training on them. 0 stores none."
        },
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.learning_rate > 0, f"--learning_rate expects more than 0, got {self.learning_rate}")
        for flag in ("margin_scale", "center_coef", "normalization_rows"):
            got = getattr(self, flag)
            mistakes.require(got >= 0, f"--{flag} expects 0 or more, got {got}")
        mistakes.require(
            0 <= self.label_smoothing < 0.5,
            f"--label_smoothing expects a share from 0 to below 0.5 (at 0.5 no order is left to learn), got "
            f"{self.label_smoothing}",
        )
