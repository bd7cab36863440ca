"""The flags of step 1's regularizers. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag


@dataclass
class RegularizerArguments:
    """Noise and the z-loss."""

    topic: ClassVar[str] = "loss"

    neftune_alpha: float = flag(
        0.0,
        "NEFTune: add uniform noise of size alpha / sqrt(length x width) to the input embeddings during training; "
        "0 adds none, and the paper uses 5, 10 and 15 (Jain et al. 2023).",
        "number >= 0",
    )
    z_loss_coef: float = flag(
        0.0,
        "Weight of the z-loss, which keeps the logits' normalizer near 1; 0 turns it off, and PaLM uses 1e-4 "
        "(Chowdhery et al. 2022).",
        "factor >= 0",
    )
