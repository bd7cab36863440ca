"""The KL divergence to the reference: estimators from log-probabilities of drawn tokens, the exact sum over the
vocabulary, and controllers of its coefficient. Pure tensors and numbers.

M tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_MOST = 20.0  # bound of an exponent, as verl's: exp(20) is 5e8, far beyond any trusted region, and stays finite
# Ziegler et al. 2019, section 2.2: the relative error is cut to +- this.
_LARGEST_ERROR = 0.2


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log p_ref for each drawn token: unbiased for KL(p || p_ref), and negative at times.

    Schulman 2020, "Approximating KL divergence", estimator k1. As a loss it pulls nowhere: its gradient, that of
    log p, is 0 on average whatever the reference says.
    """
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return 1/2 (log p - log p_ref)^2. Schulman 2020, estimator k2: biased a little; the gradient is the KL's own."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log p_ref - log p, at most 20 in the exponent: unbiased and never negative.

    Schulman 2020, estimator k3; the KL of GRPO's loss (Shao et al. 2024, equation 4).
    """
    difference = ref_logprobs - logprobs
    return torch.exp(difference.clamp(max=_MOST)) - difference - 1.0


def absolute(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return |log p - log p_ref|: no divergence, a distance that pulls equally hard at any size (verl's `abs`)."""
    return (logprobs - ref_logprobs).abs()


def full_kl(logits_MV: torch.Tensor, ref_logits_MV: torch.Tensor, chunk_tokens: int = 512) -> torch.Tensor:
    """Return float KL_M = sum over the vocabulary of p (log p - log p_ref), in nats, exact; logits of any scale.

    So many tokens at a time, and again in the backward, so that only their float32 copies stand in memory beside the
    logits of both models.
    """
    wide = torch.promote_types(logits_MV.dtype, torch.float32)

    def of_chunk(logits_CV: torch.Tensor, ref_logits_CV: torch.Tensor) -> torch.Tensor:
        log_p_CV = logits_CV.to(wide).log_softmax(-1)
        return (log_p_CV.exp() * (log_p_CV - ref_logits_CV.to(wide).log_softmax(-1))).sum(-1)

    parts = [logits_MV.new_zeros(0, dtype=wide)]
    for begin in range(0, len(logits_MV), chunk_tokens):
        here = slice(begin, begin + chunk_tokens)
        parts.append(checkpoint(of_chunk, logits_MV[here], ref_logits_MV[here], use_reentrant=False))
    return torch.cat(parts)


# Of the log-probabilities of the drawn tokens; of the logits of both models.
KL_ESTIMATORS: dict[str, Callable[..., torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
WHOLE_KL_ESTIMATORS: dict[str, Callable[..., torch.Tensor]] = {"full": full_kl}


class FixedKl:
    """The coefficient stays as it was given."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, sequences: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coefficient = float(state["coefficient"])


class AdaptiveKl(FixedKl):
    """Moves the coefficient so that the KL of a response stays near a target.

    beta <- beta (1 + clip(KL / target - 1, +- 0.2) n / horizon) after n responses whose mean KL, summed over their
    tokens, is KL nats (Ziegler et al. 2019, section 2.2; n / horizon is their K_beta as lm-human-preferences has it).
    """

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        super().__init__(coefficient)
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, sequences: int) -> None:
        error = min(max(kl / self._target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.coefficient *= 1.0 + error * sequences / self._horizon
