"""Drawing one token a row: exact sets, right frequencies, right log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.contracts.rollout_engine import Sampling
from training.utils.generation.decoding.sampling import (
    _next_uniform,
    _nucleus,
    _nucleus_in_rounds,
    draw,
    rounds_of_nucleus,
)

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0, 1.5, -0.5])


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    return Sampling(8, temperature, top_k, top_p, end_token_id=0, pad_token_id=0, min_p=min_p)


def kept_by(logits_V: torch.Tensor, how: Sampling, draws: int = 4000) -> set[int]:
    """The tokens that come up at evenly spaced uniform numbers: none of these has a probability below 1 / 1000."""
    uniform_A = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    return set(draw(logits_V.expand(draws, -1), uniform_A, how)[0].tolist())


def cut_by_sorting(logits_V: torch.Tensor, how: Sampling) -> torch.Tensor:
    """float64 [V], the distribution after temperature, top-k, top-p and min-p, by their definitions."""
    probabilities = torch.softmax(logits_V.double() / how.temperature, -1)
    order = probabilities.argsort(descending=True)
    if how.top_k:
        probabilities[order[how.top_k :]] = 0
        probabilities /= probabilities.sum()
    if how.top_p < 1:
        before = probabilities[order].cumsum(0) - probabilities[order]
        probabilities[order[before >= how.top_p]] = 0
    probabilities[probabilities < how.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def test_temperature_0_is_the_likeliest_token_with_its_log_probability_at_1():
    token_A, logprob_A = draw(LOGITS[None], torch.tensor([0.99]), sampling(temperature=0.0))
    assert token_A.tolist() == [1]
    torch.testing.assert_close(logprob_A, torch.log_softmax(LOGITS, -1)[1:2])


FOUR = torch.log(torch.tensor([0.3, 0.1, 0.2, 0.4]))  # from the likeliest on the sums are 0.4, 0.7, 0.9, 1.0


@pytest.mark.parametrize(
    ("logits", "how", "kept"),
    [
        (LOGITS, sampling(top_k=1), {1}),
        (LOGITS, sampling(top_k=2), {1, 6}),
        (LOGITS, sampling(top_k=4), {1, 6, 3, 0}),
        (LOGITS, sampling(top_k=8), set(range(8))),
        (LOGITS, sampling(top_k=0), set(range(8))),
        (LOGITS, sampling(top_k=99), set(range(8))),
        (torch.tensor([1.0, 2.0, 1.0, 0.0]), sampling(top_k=2), {0, 1, 2}),  # what equals the k-th stays
        (FOUR, sampling(top_p=1e-9), {3}),  # never nothing
        (FOUR, sampling(top_p=0.39), {3}),
        (FOUR, sampling(top_p=0.41), {3, 0}),
        (FOUR, sampling(top_p=0.69), {3, 0}),
        (FOUR, sampling(top_p=0.71), {3, 0, 2}),
        (FOUR, sampling(top_p=0.91), {3, 0, 2, 1}),
        (FOUR, sampling(top_p=1.0), {0, 1, 2, 3}),
        (FOUR, sampling(min_p=0.0), {0, 1, 2, 3}),  # shares of the likeliest: 0.75, 0.25, 0.5, 1
        (FOUR, sampling(min_p=0.3), {0, 2, 3}),
        (FOUR, sampling(min_p=0.6), {0, 3}),
        (FOUR, sampling(min_p=1.0), {3}),
        (FOUR, sampling(top_k=3, top_p=0.5), {0, 3}),  # of 0.444, 0.333, 0.222
    ],
)
def test_what_the_cuts_keep(logits, how, kept):
    assert kept_by(logits, how) == kept


@pytest.mark.parametrize(
    "how",
    [
        sampling(),
        sampling(0.5),
        sampling(1.3, top_k=40),
        sampling(top_p=0.8),
        sampling(0.7, top_p=0.3),  # three draws in four are refused, or more
        sampling(top_k=100, top_p=0.6),
        sampling(top_p=0.9, min_p=0.05),
        sampling(1.5, top_k=50, top_p=0.9, min_p=0.1),
    ],
    ids=lambda how: f"{how.temperature}-{how.top_k}-{how.top_p}-{how.min_p}",
)
def test_several_blocks_of_tokens_come_as_often_as_the_sorted_cuts_say(how):
    """300 tokens, two blocks and a part. Chi-square with f degrees of freedom is about normal: f + 4 sqrt(2 f) has a
    probability below 1 in 1000 (the draws are fixed)."""
    draws = 60_000
    logits_V = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    uniform_A = torch.rand(draws, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    token_A, logprob_A = draw(logits_V.expand(draws, -1), uniform_A, how)
    expected = cut_by_sorting(logits_V, how)
    often = expected * draws >= 5  # what chi-square asks of a cell; the rest is one cell together
    observed = torch.bincount(token_A, minlength=300).double() / draws
    assert observed[expected == 0].sum() == 0
    cells = [(observed[often], expected[often])]
    if float(expected[~often].sum()) > 0:
        cells.append((observed[~often].sum()[None], expected[~often].sum()[None]))
    statistic = sum(float(draws * ((seen - want).square() / want).sum()) for seen, want in cells)
    freedom = sum(len(want) for _, want in cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4
    torch.testing.assert_close(logprob_A, torch.log_softmax(logits_V / how.temperature, -1)[token_A])


@pytest.mark.parametrize(("top_p", "min_p"), [(0.9, 0.0), (0.3, 0.0), (0.5, 0.02)])
def test_rounds_without_waits_draw_the_same_tokens(top_p, min_p):
    """As a GPU draws: no row is asked whether it was rejected."""
    logits_V = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    weights_AV = (logits_V - logits_V.max()).exp().expand(4_000, -1)
    uniform_A = torch.rand(4_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    parts = (weights_AV, weights_AV.masked_fill(weights_AV < min_p, 0.0), uniform_A, top_p * weights_AV.sum(dim=-1))
    token_A = _nucleus(*parts)
    numbers = [uniform_A]
    for _ in range(rounds_of_nucleus(top_p)):
        numbers.append(_next_uniform(numbers[-1]))
    again_KA = torch.stack(numbers[1:])
    assert torch.equal(_nucleus_in_rounds(*parts, again_KA=again_KA), token_A)
    without = _nucleus_in_rounds(*parts, again_KA=again_KA[:0])  # refused rows have the likeliest token
    assert not torch.equal(without, token_A) and bool(((without == token_A) | (without == logits_V.argmax())).all())


def test_rounds_of_nucleus():
    """Poisson with mean -ln(top_p): for 1 / e that is 1, and P(N > 14) = 3e-13 where P(N > 13) = 4.6e-12."""
    assert rounds_of_nucleus(math.exp(-1)) == 14
    assert rounds_of_nucleus(0.999999) == 1  # P(N > 1) = 5e-13
    assert 700 < rounds_of_nucleus(1e-300) < 1000  # and it ends


def test_a_banned_token_is_not_drawn_and_changes_no_log_probability():
    """Though it is likelier than all others by e^200: what is left is drawn as if it were not there."""
    logits_AV = torch.tensor([[200.0, 0.0, math.log(3.0), -1e4]]).expand(8000, -1)
    banned_AV = torch.tensor([[True, False, False, False]]).expand(8000, -1)
    uniform_A = torch.linspace(0, 1, 8001, dtype=torch.float64)[:-1]
    for how in (sampling(), sampling(top_k=2), sampling(top_p=0.99)):
        token_A, logprob_A = draw(logits_AV, uniform_A, how, banned_AV)
        assert torch.bincount(token_A, minlength=4).tolist() == [0, 2000, 6000, 0]
        torch.testing.assert_close(logprob_A, torch.log_softmax(logits_AV[0], -1)[token_A])
    token_A, _ = draw(logits_AV[:1], uniform_A[:1], sampling(temperature=0.0), banned_AV[:1])
    assert token_A.tolist() == [2]


def test_rows_are_drawn_on_their_own():
    logits_AV = torch.stack([LOGITS, LOGITS.flip(0), torch.zeros(8)])
    uniform_A = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for how in (sampling(), sampling(top_k=3), sampling(top_p=0.6), sampling(0.3, 4, 0.9)):
        together, logprobs = draw(logits_AV, uniform_A, how)
        alone = [draw(logits_AV[row : row + 1], uniform_A[row : row + 1], how) for row in range(3)]
        assert together.tolist() == [token.item() for token, _ in alone]
        torch.testing.assert_close(logprobs, torch.cat([logprob for _, logprob in alone]))


def test_the_log_probability_is_of_the_tempered_distribution_before_top_k_and_top_p():
    """That is what the training forward computes: the first ratio of an update stays 1."""
    token_A, logprob_A = draw(LOGITS[None], torch.tensor([0.3]), sampling(0.5, top_k=2, top_p=0.5))
    torch.testing.assert_close(logprob_A[0], torch.log_softmax(LOGITS / 0.5, -1)[token_A[0]])
    assert token_A.dtype == torch.int64 and logprob_A.dtype == torch.float32


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 400),
    st.floats(0.05, 5),
    st.integers(0, 10),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.integers(0, 9999),
)
def test_the_smallest_and_the_largest_number_stay_inside(vocabulary, temperature, top_k, top_p, min_p, seed):
    logits_AV = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 10
    how = sampling(temperature, top_k, top_p, min_p)
    kept = cut_by_sorting(logits_AV[0], sampling(temperature, top_k, min(top_p * 1.001, 1.0), min_p * 0.999))
    for uniform in (0.0, 1.0 - 2.0**-53):
        token_A, logprob_A = draw(logits_AV, torch.tensor([uniform], dtype=torch.float64), how)
        assert 0 <= token_A.item() < vocabulary
        assert kept[token_A.item()] > 0
        assert math.isfinite(logprob_A.item())


def test_a_token_of_probability_0_is_never_drawn():
    logits_AV = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    drawn = {
        draw(logits_AV, torch.tensor([uniform], dtype=torch.float64), sampling())[0].item()
        for uniform in (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53)
    }
    assert drawn == {1, 3}
