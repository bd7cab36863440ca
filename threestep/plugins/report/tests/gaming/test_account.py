"""The account of a reward against sums by hand and a least-squares fit by its normal equations."""

from __future__ import annotations

import math
import random

import pytest
import torch

from threestep.plugins.report.gaming.account import account_of
from threestep.plugins.report.gaming.values import Values

CHECK = Values((), ("check",))


def sample(index: int, reward: float, text: str = "a b", **more) -> dict:
    return {
        "prompt_index": index,
        "sample": 0,
        "response": text,
        "response_tokens": len(text),
        "reward": reward,
        **more,
    }


def test_drifts_are_paired_by_prompt():
    before = [sample(0, 1.0, check=1.0), sample(1, 2.0, check=0.0), sample(2, 9.0)]
    after = [sample(1, 4.0, check=0.5), sample(0, 2.0, check=0.5), sample(3, 9.0)]
    account = account_of(before, after, CHECK)
    assert account is not None
    score, check = account.drifts
    assert (score.name, score.is_trained, score.before, score.after) == ("reward", True, 1.5, 3.0)
    assert score.error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))  # gains 1 and 2: deviation sqrt(1/2)
    assert score.deviation == pytest.approx(math.sqrt(1.1875))  # of 1, 2, 4, 2 around 2.25
    assert (check.name, check.is_trained, check.gain) == ("check", False, 0.0)
    assert account.held_out == [check] and account.explained is None  # too few samples


def test_samples_of_one_prompt_are_one_gain():
    """Two prompts with two samples each: the error is that of two gains, 1 and 3."""
    before = [dict(sample(index, 0.0), sample=place) for index in (0, 1) for place in (0, 1)]
    after = [
        dict(sample(index, gain), sample=place) for index, place, gain in ((0, 0, 0), (0, 1, 2), (1, 0, 2), (1, 1, 4))
    ]
    account = account_of(before, after, Values())
    assert account is not None and account.score.gain == 2.0 and account.score.error == pytest.approx(1.0)


def test_nothing_in_common_is_no_account():
    assert account_of([sample(0, 1.0)], [sample(1, 1.0)], CHECK) is None
    assert account_of([sample(0, math.nan)], [sample(0, 1.0)], CHECK) is None
    assert account_of([], [], CHECK) is None


def test_the_share_of_the_gain_is_that_of_a_least_squares_fit():
    """Against the normal equations in float64: coefficients times the changes of the means, over the gain."""
    dice = random.Random(3)
    made = []
    for shift in (0, 2):
        texts = ["x" * (3 + shift + dice.randrange(4)) + "!" * dice.randrange(1 + shift) for _ in range(60)]
        made.append([sample(i, 0.5 * len(t) + dice.gauss(0, 1), t) for i, t in enumerate(texts)])
    account = account_of(*made, Values())
    assert account is not None and account.explained is not None
    shares = {feature.name: feature.share for feature in account.features}
    both = made[0] + made[1]
    tokens = [float(len(each["response"])) for each in both]
    marked = [each["response"].count("!") / len(each["response"]) for each in both]
    same = []
    for side in made:
        texts = [each["response"] for each in side]
        same += [float(texts.count(text) > 1) for text in texts]
    x = torch.tensor([tokens, marked, same, [1.0] * 120], dtype=torch.float64).T
    y = torch.tensor([each["reward"] for each in both], dtype=torch.float64)
    b = torch.linalg.solve(x.T @ x, x.T @ y)
    change = x[60:].mean(0) - x[:60].mean(0)
    gain = y[60:].mean() - y[:60].mean()
    for place, name in enumerate(("length", "marks", "sameness")):
        assert shares[name] == pytest.approx(float(b[place] * change[place] / gain), rel=1e-9)
    assert shares["lines"] == shares["repetition"] == 0.0  # constant
    residual = y - x @ b
    assert account.r_squared == pytest.approx(float(1 - residual.var() / y.var()), rel=1e-9)
    assert account.explained == pytest.approx(sum(shares.values()))
    [tokens_account] = [feature for feature in account.features if feature.name == "length"]
    reference = float(torch.corrcoef(torch.stack([x[:60, 0], y[:60]]))[0, 1])
    assert tokens_account.correlations[0] == pytest.approx(reference, rel=1e-9)
    assert [f.correlations for f in account.features if f.name == "lines"] == [(None, None)]


def test_pairs_whose_score_rose_most_while_a_checker_fell():
    before = [sample(i, 0.0, check=1.0) for i in range(20)]
    after = [sample(i, float(i), check=1.0 if i % 3 == 0 else 0.5) for i in range(20)]
    account = account_of(before, after, CHECK)
    assert account is not None
    risen = [pair.after["reward"] for pair in account.pairs]
    assert risen == [19.0, 17.0, 16.0, 14.0, 13.0, 11.0, 10.0, 8.0, 7.0, 5.0]  # ten, without multiples of 3
    assert {pair.fell for pair in account.pairs} == {("check",)}
