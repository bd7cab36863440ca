"""Drawing one token a row: exact sets, right frequencies, right log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step3_ppo.rollout.base import Sampling
from training.step3_ppo.rollout.sampling import draw, keep_top_k, keep_top_p

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0, 1.5, -0.5])


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(max_new_tokens=8, temperature=temperature, top_k=top_k, top_p=top_p, end_token_id=0, pad_token_id=0)


def frequencies(how: Sampling, draws: int = 20_000) -> torch.Tensor:
    uniform_A = torch.rand(draws, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    token_A, _ = draw(LOGITS.expand(draws, -1), uniform_A, how)
    return torch.bincount(token_A, minlength=len(LOGITS)).double() / draws


def chi_square(observed: torch.Tensor, expected: torch.Tensor, draws: int = 20_000) -> float:
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    return float(draws * ((observed - expected)[kept].square() / expected[kept]).sum())


def test_temperature_0_is_the_likeliest_token_with_its_log_probability_at_1():
    token_A, logprob_A = draw(LOGITS[None], torch.tensor([0.99]), sampling(temperature=0.0))
    assert token_A.tolist() == [1]
    torch.testing.assert_close(logprob_A, torch.log_softmax(LOGITS, -1)[1:2])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_softmax_says(temperature):
    """7 degrees of freedom: a chi-square above 24.3 has a probability of 1 in 1000 (the draws are fixed)."""
    expected = torch.softmax(LOGITS.double() / temperature, -1)
    assert chi_square(frequencies(sampling(temperature)), expected) < 24.3


def test_top_k_and_top_p_renormalise_what_they_keep():
    kept = torch.tensor([1, 6, 3])
    expected = torch.zeros(8, dtype=torch.float64)
    expected[kept] = torch.softmax(LOGITS.double()[kept], -1)
    assert chi_square(frequencies(sampling(top_k=3)), expected) < 13.8  # 2 degrees of freedom
    # Probabilities from the likeliest on: 0.405, 0.245, 0.149, 0.090: 0.7 is reached by the third.
    assert torch.softmax(LOGITS, -1)[kept].tolist() == pytest.approx([0.405, 0.245, 0.149], abs=1e-3)
    assert chi_square(frequencies(sampling(top_p=0.7)), expected) < 13.8


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 6}), (4, {1, 6, 3, 0}), (8, set(range(8))), (0, set(range(8)))]
)
def test_top_k_keeps_exactly_k(top_k, kept):
    assert set(torch.isfinite(keep_top_k(LOGITS[None], top_k))[0].nonzero().flatten().tolist()) == kept


def test_top_k_larger_than_the_vocabulary():
    assert torch.equal(keep_top_k(LOGITS[None], 99), LOGITS[None])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {3}),  # never nothing
        (0.39, {3}),
        (0.41, {3, 0}),
        (0.69, {3, 0}),
        (0.71, {3, 0, 2}),
        (0.91, {3, 0, 2, 1}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    # Probabilities 0.3, 0.1, 0.2, 0.4: from the likeliest on 0.4, 0.7, 0.9, 1.0.
    logits_AV = torch.log(torch.tensor([[0.3, 0.1, 0.2, 0.4]]))
    assert set(torch.isfinite(keep_top_p(logits_AV, top_p))[0].nonzero().flatten().tolist()) == kept


def test_top_p_is_of_what_top_k_has_kept():
    # top_k keeps 0.4, 0.3, 0.2, which are 0.444, 0.333, 0.222 of what is left: 0.5 is reached by two.
    logits_AV = torch.log(torch.tensor([[0.3, 0.1, 0.2, 0.4]])).expand(1000, -1)
    uniform_A = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    token_A, _ = draw(logits_AV, uniform_A, sampling(top_k=3, top_p=0.5))
    assert set(token_A.tolist()) == {0, 3}


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
@given(st.integers(1, 400), st.floats(0.05, 5), st.integers(0, 10), st.floats(0.05, 1), st.integers(0, 9999))
def test_the_smallest_and_the_largest_number_stay_inside(vocabulary, temperature, top_k, top_p, seed):
    logits_AV = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 10
    how = sampling(temperature, top_k, top_p)
    kept = keep_top_p(keep_top_k(logits_AV / temperature, top_k), top_p)
    for uniform in (0.0, 1.0 - 2.0**-53):
        token_A, logprob_A = draw(logits_AV, torch.tensor([uniform], dtype=torch.float64), how)
        assert 0 <= token_A.item() < vocabulary
        assert math.isfinite(kept[0, token_A.item()].item())
        assert math.isfinite(logprob_A.item())


def test_a_token_of_probability_0_is_never_drawn():
    logits_AV = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    drawn = {
        draw(logits_AV, torch.tensor([uniform], dtype=torch.float64), sampling())[0].item()
        for uniform in (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53)
    }
    assert drawn == {1, 3}
