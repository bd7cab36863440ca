"""Draws one token per row. Only tensors.

A rows, V vocabulary, N blocks of the vocabulary.

A draw reads each logit a few times and never sorts: on a CPU, sorting the vocabulary for top-p costs as much as the
forward before it. On other devices a draw never waits for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import Sampling

_BLOCK_TOKENS = 128
# Of a top-p draw without waits: the share of draws at most that find no token in their rounds.
_UNFINISHED_SHARE = 1e-12


def draw(
    logits_AV: torch.Tensor,
    uniform_A: torch.Tensor,
    sampling: Sampling,
    banned_AV: torch.Tensor | None = None,
    *,
    again_KA: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_A int64, logprob_A float32) for float32 logits and one uniform number in [0, 1) per row.

    again_KA: what `further_numbers` made of `uniform_A`, once for several tokens; None: it is made here, where it is
        needed

    Order: temperature, banned tokens, then top-k, top-p and min-p as in transformers. The log-probability is that of
    the tempered distribution before all cuts, which the training forward computes. Temperature 0 picks the most likely
    token that is not banned, with its log-probability at temperature 1.
    """
    if sampling.temperature not in (0.0, 1.0):
        logits_AV = logits_AV / sampling.temperature
    allowed_AV = logits_AV if banned_AV is None else logits_AV.masked_fill(banned_AV, float("-inf"))
    if sampling.temperature == 0.0:
        token_A = allowed_AV.argmax(dim=-1)
        log_total_A = torch.logsumexp(logits_AV, dim=-1)
    else:
        peak_A1 = allowed_AV.amax(dim=-1, keepdim=True)
        weights_AV = (allowed_AV - peak_A1).exp_()
        token_A = _drawn_token(weights_AV, uniform_A.double(), sampling, again_KA)
        if banned_AV is None:
            log_total_A = peak_A1.squeeze(1) + weights_AV.sum(dim=-1).log()
        else:
            log_total_A = torch.logsumexp(logits_AV, dim=-1)
    return token_A, logits_AV.gather(-1, token_A.unsqueeze(1)).squeeze(1) - log_total_A


def further_numbers(uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """Return float64 [K, *shape of `uniform`]: the numbers with which each top-p draw draws again, K times at the most;
    None where a draw makes those that it needs. They depend on the first number alone."""
    if sampling.temperature == 0.0 or sampling.top_p >= 1.0 or uniform.device.type == "cpu":
        return None
    numbers = [uniform.double()]
    for _ in range(rounds_of_nucleus(sampling.top_p)):
        numbers.append(_next_uniform(numbers[-1]))
    return torch.stack(numbers)[1:]


def _drawn_token(
    weights_AV: torch.Tensor, uniform_A: torch.Tensor, sampling: Sampling, again_KA: torch.Tensor | None
) -> torch.Tensor:
    """Return token_A for weights in [0, 1]; the most likely token has weight 1."""
    if 0 < sampling.top_k < weights_AV.shape[-1]:
        # Drops everything below the k-th largest weight; keeps all ties with it.
        threshold_A1 = torch.topk(weights_AV, sampling.top_k, dim=-1).values[:, -1:]
        weights_AV = weights_AV.masked_fill(weights_AV < threshold_A1, 0.0)
    candidates_AV = weights_AV
    if sampling.min_p > 0.0:  # Nguyen et al. 2024: at least this share of the top probability
        candidates_AV = weights_AV.masked_fill(weights_AV < sampling.min_p, 0.0)
    if sampling.top_p >= 1.0:
        return _inverted(candidates_AV, uniform_A)
    mass_A = sampling.top_p * weights_AV.sum(dim=-1)
    if weights_AV.device.type == "cpu":  # where asking which rows go on is no wait
        return _nucleus(weights_AV, candidates_AV, uniform_A, mass_A)
    if again_KA is None:
        again_KA = further_numbers(uniform_A, sampling)
    assert again_KA is not None
    return _nucleus_in_rounds(weights_AV, candidates_AV, uniform_A, mass_A, again_KA=again_KA)


def _inverted(weights_AV: torch.Tensor, uniform_A: torch.Tensor) -> torch.Tensor:
    rows_A = torch.arange(len(weights_AV), device=weights_AV.device)
    return _inverted_at(weights_AV, uniform_A.unsqueeze(1), rows_A).squeeze(1)


def _inverted_at(weights_AV: torch.Tensor, uniform_A1: torch.Tensor, rows_A: torch.Tensor) -> torch.Tensor:
    """Return the token [A, 1] at which the running sum of the weights exceeds uniform x the total. rows_A: 0, 1, ...

    Two levels, so that only N + 128 numbers per row are summed in float64: first the block, then the token inside it.
    A token of weight 0 is never drawn. Weights that are NaN, or all 0, give some token of the vocabulary.
    """
    missing = -weights_AV.shape[-1] % _BLOCK_TOKENS
    padded_AV = torch.nn.functional.pad(weights_AV, (0, missing)) if missing else weights_AV
    blocks_ANb = padded_AV.unflatten(-1, (-1, _BLOCK_TOKENS))
    sums_AN = blocks_ANb.sum(dim=-1).double()
    running_AN = sums_AN.cumsum(dim=-1)
    # In float64 this stays below the last sum for every uniform number below 1, so the block always exists.
    bound_A1 = uniform_A1 * running_AN[:, -1:]
    block_A1 = torch.searchsorted(running_AN, bound_A1, right=True).clamp_(max=running_AN.shape[-1] - 1)
    size_A1 = sums_AN.gather(1, block_A1)
    into_A1 = (bound_A1 - (running_AN.gather(1, block_A1) - size_A1)) / size_A1
    inside_Ab = blocks_ANb[rows_A, block_A1.squeeze(1)].cumsum(dim=-1, dtype=torch.float64)
    into_A1 = into_A1.clamp_(0.0, 1.0 - 2.0**-53) * inside_Ab[:, -1:]
    token_A1 = torch.searchsorted(inside_Ab, into_A1, right=True).add_(block_A1, alpha=_BLOCK_TOKENS)
    return token_A1.clamp_(max=weights_AV.shape[-1] - 1)


def _nucleus(
    weights_AV: torch.Tensor, candidates_AV: torch.Tensor, uniform_A: torch.Tensor, mass_A: torch.Tensor
) -> torch.Tensor:
    """Return a token of `candidates_AV` from the smallest set of most likely tokens whose weights reach `mass_A`.

    Holtzman et al. 2020, by rejection instead of sorting: a token is in the set if the more likely tokens alone do not
    reach the mass. A rejected token and all that are not more likely are outside; the row draws again from the rest.
    This is exactly the cut distribution; at most a share 1 - top_p of the first draws is rejected.
    """
    token_A = _inverted(candidates_AV, uniform_A)
    less_likely_AV, rejected_A1 = _rejected(weights_AV, token_A.unsqueeze(1), mass_A.unsqueeze(1))
    rejected = torch.nonzero(rejected_A1.squeeze(1)).flatten()
    if len(rejected) == 0:
        return token_A
    rest_AV = weights_AV[rejected]
    remaining_AV = candidates_AV[rejected].masked_fill(less_likely_AV[rejected], 0.0)
    token_A[rejected] = _nucleus(rest_AV, remaining_AV, _next_uniform(uniform_A[rejected]), mass_A[rejected])
    return token_A


def _nucleus_in_rounds(
    weights_AV: torch.Tensor,
    candidates_AV: torch.Tensor,
    uniform_A: torch.Tensor,
    mass_A: torch.Tensor,
    *,
    again_KA: torch.Tensor,
) -> torch.Tensor:
    """Return the tokens of `_nucleus` without reading which rows are rejected: all rows draw again, K times, and a row
    that is not rejected keeps its token. A row that all rounds reject gets its most likely token.

    The host starts some 30 operators a round, so numbers are made before (`further_numbers`), and what is drawn for a
    row that keeps its token may be anything.
    """
    rows_A = torch.arange(len(weights_AV), device=weights_AV.device)
    token_A1 = _inverted_at(candidates_AV, uniform_A.unsqueeze(1), rows_A)
    mass_A1 = mass_A.unsqueeze(1)
    for uniform_A1 in again_KA.unsqueeze(-1).unbind():
        less_likely_AV, rejected_A1 = _rejected(weights_AV, token_A1, mass_A1)
        candidates_AV = candidates_AV.masked_fill(less_likely_AV, 0.0)
        token_A1 = torch.where(rejected_A1, _inverted_at(candidates_AV, uniform_A1, rows_A), token_A1)
    _, rejected_A1 = _rejected(weights_AV, token_A1, mass_A1)
    return torch.where(rejected_A1, weights_AV.argmax(dim=-1, keepdim=True), token_A1).squeeze(1)


def _rejected(
    weights_AV: torch.Tensor, token_A1: torch.Tensor, mass_A1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [A, V], the tokens that are no more likely than this one, and bool [A, 1]: those that are more likely
    reach the mass."""
    less_likely_AV = weights_AV <= weights_AV.gather(-1, token_A1)
    more_A1 = weights_AV.masked_fill(less_likely_AV, 0.0).sum(dim=-1, keepdim=True)
    return less_likely_AV, more_A1 >= mass_A1


def rounds_of_nucleus(top_p: float) -> int:
    """Return how many further draws finish all but `_UNFINISHED_SHARE` of top-p draws.

    A token outside of the nucleus is drawn, in some round, with probability w / (its weight and all more likely ones'),
    independently of the others. Each is at most a Poisson variable of mean -ln(1 - that), and these means add up to
    at most -ln(top_p): so the number of rejections is at most Poisson with mean -ln(top_p).
    """
    mean = -math.log(top_p)
    term = at_most = math.exp(-mean)
    rounds = 0
    while rounds < mean or min(term, 1.0 - at_most) > _UNFINISHED_SHARE:
        rounds += 1
        term *= mean / rounds
        at_most += term
    return rounds


def _next_uniform(uniform_A: torch.Tensor) -> torch.Tensor:
    """Return the next number of each row's own stream: SplitMix64 (Steele et al. 2014) of the bits of the last one, so
    that drawing again changes neither other rows nor later tokens."""

    def right(bits: torch.Tensor, count: int) -> torch.Tensor:  # logical shift; torch's keeps the sign
        return (bits >> count) & ((1 << (64 - count)) - 1)

    bits_A = (uniform_A * 2.0**53).long() + _signed(0x9E3779B97F4A7C15)
    bits_A = (bits_A ^ right(bits_A, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits_A = (bits_A ^ right(bits_A, 27)) * _signed(0x94D049BB133111EB)
    return right(bits_A ^ right(bits_A, 31), 11).double() * 2.0**-53


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
