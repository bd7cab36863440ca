"""The preference losses: by hand, against their formulas in float64, and in parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.objectives import objective
from training.step2_dpo.loss import (
    LOSSES,
    Objective,
    Responses,
    log_ratios,
    pair_figures,
    preference_loss,
)
from training.utils.layout.rows import sequence_sums
from training.utils.plugins.objectives import PreferenceLoss

OF_MARGINS = [name for name, loss in LOSSES.items() if loss.of_margins]  # others are tested in files of their own
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo")
pairs = st.lists(st.tuples(st.floats(-40, 40), st.floats(0, 1)), min_size=1, max_size=20)
betas = st.floats(0.05, 2.0)
objectives = st.one_of(
    st.builds(objective, st.sampled_from(OF_MARGINS), betas),
    st.builds(objective, st.sampled_from(SMOOTHED), betas, label_smoothing=st.sampled_from([0.1, 0.3])),
)


def smoothed(m: float, beta: float, label_smoothing: float) -> float:
    right, wrong = (math.log1p(math.exp(sign * beta * m)) for sign in (-1, 1))
    return (1 - label_smoothing) * right + label_smoothing * wrong


def robust(m: float, beta: float, label_smoothing: float) -> float:
    right, wrong = (math.log1p(math.exp(sign * beta * m)) for sign in (-1, 1))
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


FORMULAS = {  # of a margin, beta and the loss's own flags
    "sigmoid": smoothed,
    "sigmoid_norm": smoothed,
    "robust": robust,
    "ipo": lambda m, beta: (m - 1 / (2 * beta)) ** 2,
    "hinge": lambda m, beta: max(0.0, 1 - beta * m),
    "simpo": lambda m, beta, label_smoothing, simpo_gamma: smoothed(m - simpo_gamma / beta, beta, label_smoothing),
}


def loss_of(margins, weights, prompts, how: Objective, dtype=torch.float32):
    """The loss of pairs with these margins: the better ones' log-ratios are the margins, the worse ones' 0."""
    ratios_B = torch.tensor([*margins, *[0.0] * len(margins)], dtype=dtype, requires_grad=True)
    is_best_B = torch.arange(len(ratios_B)) < len(margins)
    better_Q = torch.arange(len(margins))
    weight_Q = torch.tensor(weights, dtype=dtype)
    pairs = (better_Q, better_Q + len(margins), weight_Q)
    columns = {"is_good": is_best_B.to(dtype)}
    responses = Responses(ratios_B, ratios_B, ratios_B, *pairs, is_best_B, columns)
    return preference_loss(responses, prompts, how), ratios_B


@pytest.mark.needs_plugin("objectives")
def test_every_loss_has_a_formula_here():
    assert {*FORMULAS} == {*OF_MARGINS}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.loss_of_equal_pairs])
def test_the_loss_of_equal_pairs(name):
    how = objective(name, 0.7)
    nats = loss_of([0.0], [1.0], 1.0, how, torch.float64)[0].item()
    assert how.loss.loss_of_equal_pairs(how) == pytest.approx(nats, rel=1e-12)


# Log-ratio margins 0 and 2 log 3, weights 1 and 1/2, two prompts in the step; beta 1/2 makes rewards of 0 and log 3.
@pytest.mark.parametrize(
    ("loss_type", "smoothing", "first", "second", "slopes"),
    [
        # -log sigmoid: of 0 log 2, of log 3 log 4/3; slope -beta sigmoid(-reward), sigmoid(-log 3) = 1/4
        ("sigmoid", 0.0, math.log(2), math.log(4 / 3), (-1 / 4, -1 / 8)),
        # a tenth of -log sigmoid(-reward): log 2, log 4; slopes -beta (0.9 / 2 - 0.1 / 2), -beta (0.9 / 4 - 0.1 x 3/4)
        ("sigmoid", 0.1, math.log(2), 0.9 * math.log(4 / 3) + 0.1 * math.log(4), (-0.2, -0.075)),
        # (margin - 1)^2, slope 2 (margin - 1)
        ("ipo", 0.0, 1.0, (2 * math.log(3) - 1) ** 2, (-2.0, 2 * (2 * math.log(3) - 1))),
        # 1 - reward, and 0 beyond 1 (log 3 = 1.0986); slopes -beta, 0
        ("hinge", 0.0, 1.0, 0.0, (-0.5, 0.0)),
    ],
)
def test_by_hand(loss_type, smoothing, first, second, slopes):
    how = objective(loss_type, 0.5, **({"label_smoothing": smoothing} if smoothing else {}))
    loss, ratios_B = loss_of([0.0, 2 * math.log(3)], [1.0, 0.5], 2.0, how)
    assert loss.item() == pytest.approx((first + 0.5 * second) / 2, rel=1e-6)
    loss.backward()
    better = [slopes[0] / 2, 0.5 * slopes[1] / 2]
    assert ratios_B.grad.tolist() == pytest.approx([*better, -better[0], -better[1]], rel=1e-5, abs=1e-7)


@pytest.mark.needs_plugin("objectives")
@settings(max_examples=80, deadline=None)
@given(pairs, objectives)
def test_against_the_formulas(pairs, how):
    margins, weights = zip(*pairs, strict=True)
    formula = next(FORMULAS[name] for name, loss in LOSSES.items() if loss is how.loss)
    expected = sum(w * formula(m, how.beta, **vars(how.options)) for m, w in pairs) / 7
    loss, _ = loss_of(margins, weights, 7.0, how, torch.float64)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.needs_plugin("objectives")
@settings(max_examples=30, deadline=None)
@given(pairs, objectives, st.integers(0, 20))
def test_parts_add_up_to_the_whole(pairs, how, cut):
    whole, left, right = (
        loss_of([m for m, _ in part], [w for _, w in part], 5.0, how, torch.float64)[0].item()
        for part in (pairs, pairs[:cut], pairs[cut:])
    )
    assert left + right == pytest.approx(whole, rel=1e-12, abs=1e-15)


def test_three_ranked_responses():
    # Log-ratios log 4, 0, 0 with beta 1: pairs (1, 2) and (1, 3) cost -log(4/5), (2, 3) costs log 2, a third each.
    ratios_B = torch.tensor([math.log(4), 0.0, 0.0])
    better_Q, worse_Q = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    pairs = (better_Q, worse_Q, torch.full((3,), 1 / 3))
    is_best_B = torch.tensor([True, False, False])
    loss = preference_loss(Responses(ratios_B, ratios_B, ratios_B, *pairs, is_best_B), 1.0, objective("sigmoid", 1.0))
    assert loss.item() == pytest.approx((2 * math.log(5 / 4) + math.log(2)) / 3)


def test_a_loss_of_responses_is_divided_by_the_prompts_and_sees_their_columns():
    def of_responses(responses: Responses, how: Objective) -> torch.Tensor:
        return (how.beta * responses.columns["is_good"] * responses.ratios_B).sum()

    none = torch.zeros(0, dtype=torch.int64)
    ratios_B = torch.tensor([1.0, 2.0, 4.0])
    columns = {"is_good": torch.tensor([1.0, 0, 1])}
    given = Responses(ratios_B, ratios_B, ratios_B, none, none, torch.zeros(0), none, columns)
    how = Objective(PreferenceLoss("", of_responses=of_responses), 0.5)
    assert preference_loss(given, 2.0, how).item() == 1.25


def test_the_figures_of_pairs():
    rewards_B = torch.tensor([3.0, 1.0, 2.0, 2.0])
    pairs_Q = (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.ones(3))
    found = pair_figures(rewards_B, Responses(rewards_B, rewards_B, rewards_B, *pairs_Q, torch.ones(4, dtype=bool)))
    assert found == {"pairs": 3, "right": 1, "chosen_reward": 6, "rejected_reward": 5}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_wide_margin_does_not_overflow(smoothing):
    loss, ratios_B = loss_of([-1000.0, 1000.0], [1.0, 1.0], 1.0, objective("sigmoid", 1.0, label_smoothing=smoothing))
    assert loss.item() == pytest.approx((1 - smoothing) * 1000 + smoothing * 1000)
    loss.backward()
    assert ratios_B.grad[:2].tolist() == pytest.approx([-(1 - smoothing), smoothing])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_no_pairs_give_zero_on_the_graph(loss_type):
    loss, ratios_B = loss_of([], [], 5.0, objective(loss_type, 0.1))
    loss.backward()
    assert loss.item() == 0 and ratios_B.grad.numel() == 0


def test_sums_of_sequences():
    # Sequence 1 has no token here; the tokens of 0 and 2 are mixed.
    sums_B = sequence_sums(torch.tensor([1.0, 10.0, 2.0, 20.0]), torch.tensor([0, 2, 0, 2]), 3)
    assert sums_B.tolist() == [3.0, 0.0, 30.0]
    assert sequence_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2).tolist() == [0.0, 0.0]


@pytest.mark.needs_plugin("objectives")
def test_log_ratios_are_sums_or_means():
    logprobs_B, reference_B, tokens_B = torch.tensor([-6.0, -4.0]), torch.tensor([-9.0, -2.0]), torch.tensor([3.0, 4.0])
    assert {name for name, loss in LOSSES.items() if loss.is_token_mean} == {"sigmoid_norm", "ipo", "orpo", "simpo"}
    for loss in LOSSES.values():
        expected = [3.0, -2.0] if loss.needs_reference else [-6.0, -4.0]
        if loss.is_token_mean:
            expected = [expected[0] / 3, expected[1] / 4]
        assert log_ratios(logprobs_B, reference_B, tokens_B, loss).tolist() == expected
