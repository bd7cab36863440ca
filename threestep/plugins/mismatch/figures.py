"""Figures of the distance between the rollout's policy and the trained one, and of its correction. Pure tensors.

d = log p_train - log p_rollout of a token. B sequences, R response tokens, M tokens inside the responses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from threestep.plugins.mismatch.recipes import LEVELS
from threestep.plugins.mismatch.rejection import kept_by, kept_tokens, vetoed
from threestep.plugins.mismatch.settings import MismatchSettings
from threestep.plugins.mismatch.weights import MOST, importance_weights, ratios, sequences_of
from training.step3_ppo.contracts.measures import Measure, spread

# Groups of the figures of probabilities: in training, in the rollout, and their difference.
PROBABILITIES = ("train_probability", "rollout_probability", "probability_gap")


def mismatch_measures(
    old_logprobs_BR: torch.Tensor,
    sampled_logprobs_BR: torch.Tensor,
    inside_BR: torch.Tensor,
    settings: MismatchSettings | None,
    *,
    weights_BR: torch.Tensor | None = None,
) -> list[Measure]:
    """Return, over tokens: k1, k2 and k3, estimates of KL(rollout || train) (Schulman 2020), and |d|. Over responses:
    the perplexities, and train / rollout perplexity, exp of the mean of -d. Ratios at each level, with the shares above
    and below the bounds (those of the flags' defaults without a correction). weights_BR: of the correction.
    """
    bounds = settings or MismatchSettings("none")
    log_ratio_M = (old_logprobs_BR - sampled_logprobs_BR)[inside_BR]
    sequence_M = sequences_of(inside_BR)
    measures = [
        Measure(-log_ratio_M, {"mean": "mismatch/k1"}),
        Measure(log_ratio_M.square() / 2, {"mean": "mismatch/k2"}),
        Measure(torch.exp(log_ratio_M.clamp(max=MOST)) - log_ratio_M - 1.0, {"mean": "mismatch/k3"}),
        Measure(log_ratio_M.abs(), {"mean": "rollout/logprob_mismatch", "max": "mismatch/logprob_difference_max"}),
        *_probabilities(old_logprobs_BR[inside_BR], sampled_logprobs_BR[inside_BR]),
        *_perplexities(old_logprobs_BR, sampled_logprobs_BR, inside_BR),
    ]
    first_M = torch.ones_like(sequence_M, dtype=torch.bool)
    first_M[1:] = sequence_M[1:] != sequence_M[:-1]
    for level in LEVELS:
        rho = ratios(log_ratio_M, sequence_M, level).double()
        rho = rho if level == "token" else rho[first_M]  # a response's ratio once
        name = f"mismatch/{level}_ratio"
        chi2 = {} if level == "geometric" else {"chi2": f"mismatch/{level}_chi2"}
        measures += [
            Measure(rho, spread(name) | chi2),
            Measure(rho > bounds.threshold, {"mean": f"{name}_above"}),
            Measure(rho < bounds.least, {"mean": f"{name}_below"}),
        ]
    if settings is None:
        return measures
    return measures + _of_correction(
        log_ratio_M, sequence_M, first_M, settings, weights_BR=weights_BR, inside_BR=inside_BR
    )


def _probabilities(old_M: torch.Tensor, sampled_M: torch.Tensor) -> list[Measure]:
    """Return the deviations of a token's probability in training and in the rollout, and of their difference; of its
    size the mean, deviation and maximum."""
    train_M, rollout_M = old_M.double().exp(), sampled_M.double().exp()
    difference_M = train_M - rollout_M
    deviations = zip(PROBABILITIES, (train_M, rollout_M, difference_M), strict=True)
    size = {statistic: f"mismatch/probability_difference_{statistic}" for statistic in ("mean", "std", "max")}
    return [
        *(Measure(values_M, {"std": f"mismatch/{name}_std"}) for name, values_M in deviations),
        Measure(difference_M.abs(), size),
    ]


def _perplexities(old_BR: torch.Tensor, sampled_BR: torch.Tensor, inside_BR: torch.Tensor) -> list[Measure]:
    lengths_B = inside_BR.sum(dim=1)
    train_B, rollout_B = (
        torch.where(inside_BR, -logprobs_BR, 0.0).sum(dim=1) / lengths_B for logprobs_BR in (old_BR, sampled_BR)
    )
    difference_B = train_B - rollout_B
    return [
        Measure(torch.exp(train_B.clamp(max=MOST)), {"mean": "mismatch/train_perplexity"}),
        Measure(torch.exp(rollout_B.clamp(max=MOST)), {"mean": "mismatch/rollout_perplexity"}),
        Measure(torch.exp(difference_B.clamp(max=MOST)), {"mean": "mismatch/perplexity_ratio"}),
        Measure(difference_B, spread("mismatch/log_perplexity_difference")),
        Measure(difference_B.abs(), {"mean": "mismatch/log_perplexity_difference_abs"}),
    ]


def _of_correction(
    log_ratio_M: torch.Tensor,
    sequence_M: torch.Tensor,
    first_M: torch.Tensor,
    settings: MismatchSettings,
    *,
    weights_BR: torch.Tensor | None,
    inside_BR: torch.Tensor,
) -> list[Measure]:
    """Return shares of tokens that bounds changed, and of tokens and responses that are rejected, by cause; and the
    weights' spread and effective sample size, over tokens."""
    measures: list[Measure] = []
    if settings.correction != "none":
        changed_M = importance_weights(log_ratio_M, sequence_M, settings) != ratios(
            log_ratio_M, sequence_M, settings.level
        )
        measures.append(Measure(changed_M, {"mean": "mismatch/clipped_share"}))
    if weights_BR is not None:
        shows = spread("mismatch/weight") | {"ess": "mismatch/effective_sample_size"}
        measures.append(Measure(weights_BR[inside_BR], shows))
    if settings.rejects:
        kept_M = kept_tokens(log_ratio_M, sequence_M, settings)
        measures.append(Measure(~kept_M, {"mean": "mismatch/rejected_share"}))
        for rejection in settings.rejection:
            one_M = kept_by(log_ratio_M, sequence_M, rejection)
            measures.append(Measure(~one_M, {"mean": f"mismatch/rejected_{rejection.kind}"}))
        if settings.veto is not None:
            lost_M = vetoed(log_ratio_M, sequence_M, settings.veto)
            measures.append(Measure(lost_M[first_M], {"mean": "mismatch/vetoed_share"}))
    return measures


def probability_correlation(figures: Mapping[str, float]) -> dict[str, float]:
    """Return Pearson's correlation of tokens' probabilities in training and in the rollout, from their deviations and
    that of their difference: Var(x - y) = Var x + Var y - 2 Cov; none where either is constant."""
    train, rollout, difference = (figures.get(f"mismatch/{name}_std", 0.0) for name in PROBABILITIES)
    if not (train > 0 and rollout > 0):
        return {}
    covariance = (train**2 + rollout**2 - difference**2) / 2
    return {"mismatch/probability_correlation": covariance / (train * rollout)}
