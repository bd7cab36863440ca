"""Losses and advantages in plain float64 PyTorch, a line or two each from its paper: what tests compare with.

They share no code with the program, nor with the judge's references. S sequences, T tokens, B responses; two responses
to one prompt follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import logsigmoid

PAIR_LOSSES = (
    *("sigmoid", "sigmoid_norm", "robust", "ipo", "hinge", "apo_zero", "apo_down", "simpo", "cpo", "orpo", "sft"),
    *("sum", "lengths"),
)
RANKING_LOSS = "plackett_luce"
MARKED_LOSSES = ("kto", "bco")
POLICY_LOSSES = ("ppo", "gspo", "cispo", "geo_mean", "sapo", "gpg", "kl_cov", "clip_cov")
ESTIMATORS = (
    *("gae", "grpo", "grpo_passk", "rloo", "reinforce++", "reinforce++_baseline", "remax", "opo", "gpg"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "k3 bounded")


@dataclass
class Sums:
    """Of responses. sums_S: log-probabilities. weighted_S: tokens beyond the pair's shortest response weigh less.
    reference_S: the reference's. counts_S: tokens. constants: by the names of a record's settings."""

    sums_S: torch.Tensor
    weighted_S: torch.Tensor
    reference_S: torch.Tensor
    counts_S: torch.Tensor
    constants: Mapping[str, float]


def gap(values_S: torch.Tensor) -> torch.Tensor:
    """Chosen less rejected."""
    return values_S[0::2] - values_S[1::2]


def comparison(name: str, own: Sums) -> torch.Tensor:
    """What the loss of each pair has of both responses. lengths: sigmoid of LD-DPO's sums (Liu et al. 2024)."""
    beta, smoothing = own.constants["beta"], own.constants.get("label_smoothing", 0.0)
    ratio_S, mean_S = own.weighted_S - own.reference_S, own.sums_S / own.counts_S
    margin = beta * gap(ratio_S)

    def smooth(margin: torch.Tensor) -> torch.Tensor:  # Mitchell 2023
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)

    if name == "sigmoid_norm":  # Lambert et al. 2024
        return smooth(beta * gap(ratio_S / own.counts_S))
    if name == "robust":  # Chowdhury et al. 2024
        own_way, other = -(1 - smoothing) * logsigmoid(margin), smoothing * logsigmoid(-margin)
        return (own_way + other) / (1 - 2 * smoothing)
    if name == "ipo":  # Azar et al. 2023, equation 17, of means
        return (gap(ratio_S / own.counts_S) - 1 / (2 * beta)).square()
    if name == "hinge":  # Zhao et al. 2023
        return torch.relu(1 - margin)
    if name == "apo_zero":  # D'Oosterlinck et al. 2024, equations 7 and 8
        return 1 - torch.sigmoid(beta * ratio_S[0::2]) + torch.sigmoid(beta * ratio_S[1::2])
    if name == "apo_down":
        return torch.sigmoid(beta * ratio_S[0::2]) + 1 - torch.sigmoid(margin)
    if name == "simpo":  # Meng et al. 2024, equation 6
        return smooth(beta * gap(mean_S) - own.constants["simpo_gamma"])
    if name == "cpo":  # Xu et al. 2024
        return smooth(beta * gap(own.sums_S))
    if name == "orpo":  # Hong et al. 2024, equations 4 and 7
        return -beta * logsigmoid(gap(mean_S - torch.log1p(-mean_S.exp())))
    return torch.zeros_like(margin) if name == "sft" else smooth(margin)  # Rafailov et al. 2023, equation 7


def pair_loss(name: str, own: Sums) -> torch.Tensor:
    """The loss of each pair. sum: 0.8 sigmoid + 0.2 sft."""
    shares = {"sum": (0.8, 0.2), "cpo": (1.0, own.constants.get("cpo_alpha", 0.0)), "orpo": (1.0, 1.0), "sft": (0, 1.0)}
    compared, likely = shares.get(name, (1.0, 0.0))
    likelihood = -(own.sums_S / own.counts_S)[0::2]  # Pang et al. 2024, equation 1; Hong et al. 2024, equation 6
    return compared * comparison(name, own) + likely * likelihood


def ranking_loss(own: Sums, responses: int = 3) -> torch.Tensor:
    """The loss of each prompt's ranking of so many, the best first (Rafailov et al. 2023, appendix A.3)."""
    rewards = (own.constants["beta"] * (own.weighted_S - own.reference_S)).view(-1, responses)
    return sum(rewards[:, place:].logsumexp(1) - rewards[:, place] for place in range(responses))


def marked_loss(name: str, own: Sums, is_good_S: torch.Tensor) -> torch.Tensor:
    """The loss of each response (Ethayarajh et al. 2024, equations 7 and 8; Jung et al. 2024)."""
    good_S = is_good_S.double()
    sign_S = 2.0 * good_S - 1.0
    gain_S = sign_S * own.constants["beta"] * (own.sums_S - own.reference_S - own.constants["point"])
    if name == "bco":
        return -logsigmoid(gain_S)
    weight_S = own.constants["desirable_weight"] * good_S + own.constants["undesirable_weight"] * (1 - good_S)
    return weight_S * torch.sigmoid(-gain_S)


@dataclass
class DrawnTokens:
    """The tokens of one sequence. new_T has a gradient. is_counted_T, is_selected_T: bool. constants: by the names of a
    record's settings."""

    new_T: torch.Tensor
    old_T: torch.Tensor
    advantage_T: torch.Tensor
    is_counted_T: torch.Tensor
    is_selected_T: torch.Tensor
    constants: Mapping[str, float] = field(default_factory=dict)


def policy_loss(name: str, own: DrawnTokens) -> torch.Tensor:
    new_T, advantage_T, constants = own.new_T, own.advantage_T, own.constants
    low, high = constants["clip_low"], constants["clip_high"]
    apart_T = new_T - own.old_T
    if name == "gspo":  # Zheng et al. 2025, equation 14
        apart_T = apart_T[own.is_counted_T].mean().detach() + new_T - new_T.detach()
    ratio_T = apart_T.exp()
    held_T = ratio_T.clamp(1 - low, 1 + high)
    loss_T = torch.maximum(-ratio_T * advantage_T, -held_T * advantage_T)
    if name in ("ppo", "clip_cov") and "dual_clip" in constants:  # Ye et al. 2020, equation 4
        bound_T = torch.minimum(loss_T, -constants["dual_clip"] * advantage_T)
        loss_T = torch.where(advantage_T < 0, bound_T, loss_T)
    if name == "cispo":  # Chen et al. 2025, equation 4
        return -held_T.detach() * advantage_T * new_T
    if name == "geo_mean":  # Zhao et al. 2025
        bound_T = torch.where(advantage_T > 0, apart_T.clamp(max=high), apart_T.clamp(min=-low))
        means = advantage_T[own.is_counted_T].mean(), bound_T[own.is_counted_T].mean()
        return (-means[0] * means[1].exp()).expand_as(new_T)
    if name == "sapo":  # Gao et al. 2025
        above_T = (advantage_T > 0).double()
        tau_T = constants["sapo_tau_pos"] * above_T + constants["sapo_tau_neg"] * (1 - above_T)
        return -advantage_T * 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    if name == "gpg":  # Chu et al. 2025
        return -advantage_T * new_T
    if name == "kl_cov":  # Cui et al. 2025
        penalty_T = constants["kl_cov_coef"] * faded(apart_T)
        return -ratio_T * advantage_T + torch.where(own.is_selected_T, penalty_T, 0.0)
    return torch.where(own.is_selected_T, 0.0, loss_T) if name == "clip_cov" else loss_T


def faded(apart_T: torch.Tensor) -> torch.Tensor:
    """|d|, whose slope fades below a thousandth of a nat, where it may be rounding."""
    return torch.where(apart_T.abs() < 1e-3, apart_T.abs() ** 3 / 3e-6, apart_T.abs())


def kl(name: str, new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Schulman 2020. With a +: its gradient is k2's. bounded: at most 0.05."""
    apart_T, plain = new_T - reference_T, name[:2]
    if name == "abs":
        return faded(apart_T)
    found_T = {"k1": apart_T, "k2": apart_T.square() / 2, "k3": (-apart_T).exp() - 1 + apart_T}[plain]
    if name.endswith("+"):
        return found_T.detach() + apart_T.square() / 2 - apart_T.square().detach() / 2
    return found_T.clamp(max=0.05) if name.endswith("bounded") else found_T


@dataclass
class Rollout:
    """rewards, values, logprobs, collisions: of each response's tokens. greedy_B: scores of greedy responses."""

    rewards: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    logprobs: Sequence[torch.Tensor]
    collisions: Sequence[torch.Tensor]
    greedy_B: torch.Tensor
    gamma: float
    lam: float


def advantages(name: str, rollout: Rollout) -> list[torch.Tensor]:
    """The advantages of each response's tokens, whitened where the estimator does so by default."""
    if name == "gae":
        found = [gae(*each, rollout.gamma, rollout.lam) for each in zip(rollout.rewards, rollout.values, strict=True)]
    elif name == "reinforce++":
        found = [to_go(rewards, rollout.gamma) for rewards in rollout.rewards]
    elif name == "remax":  # Li et al. 2024, algorithm 1
        found = [to_go(each, 1.0) - greedy for each, greedy in zip(rollout.rewards, rollout.greedy_B, strict=True)]
    elif name.endswith("token_baseline"):
        return token_baseline(rollout)
    else:
        own_B = of_outcomes(name, rollout.rewards)
        found = [own.expand_as(each) for own, each in zip(own_B, rollout.rewards, strict=True)]
    if name not in ("gae", "reinforce++", "reinforce++_baseline"):
        return found
    whole = torch.cat(found)  # Huang et al. 2022, detail 7
    return [(each - whole.mean()) / (whole.var() + 1e-8).sqrt() for each in found]


def gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Schulman et al. 2016, equation 16."""
    after = torch.cat([values[1:], values.new_zeros(1)])
    return to_go(rewards + gamma * after - values, gamma * lam)


def to_go(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """The discounted sum from each token on."""
    count = len(rewards)
    return torch.stack([sum(gamma ** (k - t) * rewards[k] for k in range(t, count)) for t in range(count)])  # type: ignore[misc]


def of_outcomes(name: str, rewards: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B], of estimators that compare the two responses to a prompt by the sums of their rewards."""
    outcome = torch.stack([each.sum() for each in rewards]).view(-1, 2)
    lengths = torch.tensor([float(len(each)) for each in rewards], dtype=torch.float64).view(-1, 2)
    mean, std = outcome.mean(1, keepdim=True), outcome.std(1, keepdim=True)
    if name == "grpo":  # Shao et al. 2024, section 4.1.2
        found = (outcome - mean) / (std + 1e-4)
    elif name == "grpo_passk":  # Tang et al. 2025
        found = torch.relu(outcome - outcome.flip(1)) / (std + 1e-4)
    elif name == "rloo":  # Ahmadian et al. 2024, equation 10
        found = outcome - outcome.flip(1)
    elif name == "opo":  # Hao et al. 2025
        found = outcome - (lengths * outcome).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    else:  # REINFORCE++'s baseline; GPG, whose factor is 1 where all groups differ
        found = outcome - mean
    return found.flatten()


def token_baseline(rollout: Rollout) -> list[torch.Tensor]:
    """Li et al. 2026. Where one of a pair goes on alone, its return."""
    returns = [to_go(each, 1.0) for each in rollout.rewards]
    energies = [
        (1 - 2 * logprobs.exp() + collisions).clamp(min=0).cumsum(0)
        for logprobs, collisions in zip(rollout.logprobs, rollout.collisions, strict=True)
    ]
    found = [each.clone() for each in returns]
    for first in range(0, len(returns), 2):
        pair = (first, first + 1)
        for t in range(min(len(returns[each]) for each in pair)):
            weights = [energies[each][t] for each in pair]
            mean = sum(weights[k] * returns[each][t] for k, each in enumerate(pair)) / sum(weights)
            for each in pair:
                found[each][t] = returns[each][t] - mean
    return found
