"""The regularizer of a run's flags. Cheap to import: flags are checked by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from threestep.plugins.sft_losses.arguments import RegularizerArguments
from training.step1_sft.regularizer import AddedLoss, Regularizer

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.flags.added import AddedFlags
    from training.utils.models.token_model import TokenLogprobs


class NoiseAndZLoss(Regularizer):
    """neftune_alpha: size of the noise. z_loss_coef: weight of the z-loss. 0 leaves either out."""

    def __init__(self, neftune_alpha: float = 0.0, z_loss_coef: float = 0.0) -> None:
        self._alpha, self._z_coef = neftune_alpha, z_loss_coef
        self.why_not_shared = f"--neftune_alpha {neftune_alpha:g} gives each row its own noise" * bool(neftune_alpha)
        self.draws_noise = neftune_alpha > 0
        self.losses = ("z_loss",) if z_loss_coef else ()
        self.recorded = {"z_loss_coef": z_loss_coef, "embedding_noise": neftune_alpha}

    def noise(self, rows: TokenRows, seeds_B: Sequence[int], width: int) -> torch.Tensor:
        """See `Regularizer.noise`."""
        from threestep.plugins.sft_losses.neftune import embedding_noise

        return embedding_noise(rows, seeds_B, self._alpha, width)

    def added(self, read: TokenLogprobs, tokens_in_step: float) -> dict[str, AddedLoss]:
        """See `Regularizer.added`."""
        from threestep.plugins.sft_losses.z_loss import z_loss

        if not self._z_coef:
            return {}
        return {"z_loss": AddedLoss(self._z_coef, z_loss(read.log_normalizers_M, tokens_in_step))}


def regularizer_of_flags(flags: AddedFlags) -> NoiseAndZLoss:
    """Return the regularizer of a run of step 1."""
    given = flags.of(RegularizerArguments)
    return NoiseAndZLoss(given.neftune_alpha, given.z_loss_coef)
