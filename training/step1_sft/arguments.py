"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass

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
