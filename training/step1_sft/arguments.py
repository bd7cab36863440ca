"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.mtp.settings import COEF_HELP, LAYERS_HELP, MtpSettings, check_mtp
from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag


@dataclass
class SftArguments:
    """Supervised fine-tuning."""

    learning_rate: float = flag(2e-5, "Peak learning rate (the default is Alpaca's for full fine-tuning).", above=0)
    neftune_alpha: float = flag(
        0.0,
        "NEFTune: uniform noise of alpha / sqrt(length x width) on the input embeddings, in training only; "
        "0 adds none, the paper tries 5, 10 and 15 (Jain et al. 2023).",
        least=0,
    )
    z_loss_coef: float = flag(
        0.0,
        "Weight of the z-loss, which holds the logits' normalizer near 1; 0 adds none, PaLM trains with "
        "1e-4 (Chowdhery et al. 2022).",
        least=0,
    )
    mtp_num_layers: int = flag(MtpSettings.layers, LAYERS_HELP, least=0)
    mtp_loss_coef: float = flag(MtpSettings.loss_coef, COEF_HELP, above=0)

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_mtp(mistakes, self.mtp_num_layers, self.mtp_loss_coef)
