"""Correction of a rollout that another policy drew than the one that is trained. A plugin may correct it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.measures.measures import Measure
    from training.utils.contracts.rollout import DrawnTokens


class Corrected(NamedTuple):
    """weights_BR: float32, of each token's policy loss, 0 outside the response and where rejected; None without a
    correction. kept_BR: bool, False where a token leaves the denominators of the actor's loss; None where all stay."""

    weights_BR: torch.Tensor | None = None
    kept_BR: torch.Tensor | None = None


class Correction:
    """No correction, and nothing reported.

    reads_old_policy: it compares the rollout's log-probabilities with the training forward's.
    bypasses: the rollout's log-probabilities are the old policy's, and no forward is read for these.
    """

    reads_old_policy = False
    bypasses = False

    def corrected(self, old_logprobs_BR: torch.Tensor | None, drawn: DrawnTokens, counts_B: torch.Tensor) -> Corrected:
        """Weigh and reject the tokens of a rollout. old_logprobs_BR, counts_B: as of Experience. A collective."""
        return Corrected()

    def loss_weights(self, log_ratio_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor | None:
        """Return weights that the policy of each update decides; None where `corrected` has them. log_ratio_M: log p of
        the policy in training - old log p."""
        return None

    def measures(self, old_logprobs_BR: torch.Tensor, drawn: DrawnTokens, corrected: Corrected) -> list[Measure]:
        """Return measures of the distance between both policies, and of what was corrected."""
        return []

    def figures(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return figures that follow from others, such as those of `measures`."""
        return {}


NO_CORRECTION = Correction()
