"""The correction as step 3's loop has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threestep.plugins.mismatch.arguments import MismatchArguments
from threestep.plugins.mismatch.figures import mismatch_measures, probability_correlation
from threestep.plugins.mismatch.weights import corrected, loss_weights
from training.step3_ppo.contracts.records import Corrected, Correction
from training.step3_ppo.flags.rollout_choices import draws_exactly
from training.utils.engine.ranks.collectives import summed

if TYPE_CHECKING:
    import torch

    from threestep.plugins.mismatch.settings import MismatchSettings
    from training.step3_ppo.contracts.measures import Measure
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.rollout import DrawnTokens


def correction(flags: PpoFlags) -> MismatchCorrection:
    """Return the correction of a run's flags."""
    return MismatchCorrection(flags.added.of(MismatchArguments).chosen(is_exact=draws_exactly(flags)))


@dataclass(frozen=True)
class MismatchCorrection(Correction):
    """Corrects as the settings say, and reports how far both policies are apart."""

    settings: MismatchSettings

    @property
    def bypasses(self) -> bool:  # type: ignore[override]
        return self.settings.bypass

    @property
    def reads_old_policy(self) -> bool:  # type: ignore[override]
        return self.settings.acts and not self.bypasses

    def corrected(self, old_logprobs_BR: torch.Tensor | None, drawn: DrawnTokens, counts_B: torch.Tensor) -> Corrected:
        if not self.reads_old_policy:
            return Corrected()
        assert old_logprobs_BR is not None  # reads_old_policy
        return corrected(old_logprobs_BR, drawn, counts_B, self.settings, over_ranks=summed)

    def loss_weights(self, log_ratio_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor | None:
        return loss_weights(log_ratio_M, sequence_M, self.settings) if self.bypasses else None

    def measures(self, old_logprobs_BR: torch.Tensor, drawn: DrawnTokens, corrected: Corrected) -> list[Measure]:
        if self.bypasses:
            return []
        settings = self.settings if self.settings.acts else None
        policies = (old_logprobs_BR, drawn.logprobs_BR, drawn.mask_BR)
        return mismatch_measures(*policies, settings, weights_BR=corrected.weights_BR)

    def figures(self, figures: Mapping[str, float]) -> dict[str, float]:
        return probability_correlation(figures)
