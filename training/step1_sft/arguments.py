"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.step1_sft.settings import SftSettings
from training.utils.run.errors import Mistakes


@dataclass
class SftArguments:
    """Supervised fine-tuning."""

    learning_rate: float = field(
        default=2e-5, metadata={"help": "Peak learning rate (the default is Alpaca's for full fine-tuning)."}
    )
    neftune_alpha: float = field(
        default=SftSettings.neftune_alpha,
        metadata={
            "help": "NEFTune: uniform noise of alpha / sqrt(length x width) on the input embeddings, in training only; "
            "0 adds none, the paper tries 5, 10 and 15 (Jain et al. 2023)."
        },
    )
    z_loss_coef: float = field(
        default=SftSettings.z_loss_coef,
        metadata={
            "help": "Weight of the z-loss, which holds the logits' normalizer near 1; 0 adds none, PaLM trains with "
            "1e-4 (Chowdhery et al. 2022)."
        },
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.learning_rate > 0, f"--learning_rate expects more than 0, got {self.learning_rate}")
        for flag in ("neftune_alpha", "z_loss_coef"):
            got = getattr(self, flag)
            mistakes.require(got >= 0, f"--{flag} expects 0 (off) or more, got {got}")

    def settings(self) -> SftSettings:
        return SftSettings(neftune_alpha=self.neftune_alpha, z_loss_coef=self.z_loss_coef)
