"""What step 1's loss has besides the likelihood. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SftSettings:
    """neftune_alpha: size of the noise on input embeddings in training (`neftune`). z_loss_coef: weight of the z-loss
    (`loss.z_loss`). 0 leaves either out."""

    neftune_alpha: float = 0.0
    z_loss_coef: float = 0.0
