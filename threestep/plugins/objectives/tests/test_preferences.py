"""Every loss on pairs from the log-probabilities of tokens: by hand, and against its paper in float64, line by line."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import pages
from tests.support.objectives import objective, objectives
from threestep.plugins.objectives.preferences import log_odds
from training.step2_dpo.loss import (
    LOSSES,
    Objective,
    Responses,
    log_ratios,
    mark_figures,
    preference_loss,
    weighted_sum,
)
from training.utils.plugins.objectives import PreferenceLoss
from training.utils.plugins.plugin import TABLES

# A pair of three tokens each (the prompt apart): r_w = 0.4, r_l = -0.6, so that m = 1, and a token's means are thirds.
POLICY = ([-0.5, -1.0, -1.5], [-1.0, -2.0, -0.5])
REFERENCE = ([-0.7, -1.1, -1.6], [-0.8, -1.4, -0.7])


def responses_of(prompts, how: Objective) -> tuple[Responses, list[torch.Tensor]]:
    """The responses of prompts, and the policy's tokens, which ask for gradients. prompts: of each the policy's and the
    reference's log-probabilities of tokens, response by response, best first."""
    leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for policy, _ in prompts for row in policy]
    then = [torch.tensor(row, dtype=torch.float64) for _, reference in prompts for row in reference]
    logprobs_B, reference_B = (torch.stack([row.sum() for row in rows]) for rows in (leaves, then))
    tokens_B = torch.tensor([float(row.numel()) for row in leaves], dtype=torch.float64)
    ratios_B = log_ratios(
        logprobs_B, reference_B if how.loss.needs_reference else 0.0 * reference_B, tokens_B, how.loss
    )
    better, worse, weights, best, first = [], [], [], [], 0
    for policy, _ in prompts:
        pairs = list(combinations(range(first, first + len(policy)), 2))
        better += [winner for winner, _ in pairs]
        worse += [loser for _, loser in pairs]
        weights += [1.0 / len(pairs)] * len(pairs)
        best += [place == 0 for place in range(len(policy))]
        first += len(policy)
    pairs_Q = (torch.tensor(better), torch.tensor(worse), torch.tensor(weights, dtype=torch.float64))
    return Responses(ratios_B, logprobs_B, tokens_B, *pairs_Q, torch.tensor(best)), leaves


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def of_paper(name: str, better, worse, b: float, e: float) -> torch.Tensor:
    """The loss of a pair as its paper writes it, of (policy, reference) tokens; SimPO's gamma 0.5, CPO's alpha 1."""
    (pw, qw), (pl, ql) = better, worse
    r_w, r_l = pw.sum() - qw.sum(), pl.sum() - ql.sum()
    mean_w, mean_l = pw.sum() / len(pw), pl.sum() / len(pl)
    m = r_w - r_l

    def smooth(x):
        return -(1 - e) * torch.log(sigmoid(x)) - e * torch.log(sigmoid(-x))

    if name == "sigmoid":
        return smooth(b * m)
    if name == "sigmoid_norm":
        return smooth(b * (r_w / len(pw) - r_l / len(pl)))
    if name == "robust":
        return ((1 - e) * -torch.log(sigmoid(b * m)) - e * -torch.log(sigmoid(-b * m))) / (1 - 2 * e)
    if name == "ipo":
        return (r_w / len(pw) - r_l / len(pl) - 1 / (2 * b)) ** 2
    if name == "hinge":
        return torch.clamp(1 - b * m, min=0.0)
    if name == "apo_zero":
        return 1 - sigmoid(b * r_w) + sigmoid(b * r_l)
    if name == "apo_down":
        return sigmoid(b * r_w) + 1 - sigmoid(b * (r_w - r_l))
    if name == "orpo":
        p_w, p_l = torch.exp(mean_w), torch.exp(mean_l)
        return b * -torch.log(sigmoid(torch.log((p_w / (1 - p_w)) / (p_l / (1 - p_l)))))
    if name == "simpo":
        return smooth(b / len(pw) * pw.sum() - b / len(pl) * pl.sum() - 0.5)
    if name == "sft":
        return 0.0 * m
    assert name == "cpo", name
    return smooth(b * pw.sum() - b * pl.sum())


def of_ranking(responses, b: float) -> torch.Tensor:
    """-log of the product over k of exp(b r_k) / sum over j >= k of exp(b r_j)."""
    scores = [torch.exp(b * (policy.sum() - reference.sum())) for policy, reference in responses]
    shares = [score / sum(scores[place:]) for place, score in enumerate(scores)]
    return -sum(torch.log(share) for share in shares)


LIKELIHOOD = {"orpo": 1.0, "cpo": 1.0, "sft": 1.0}  # its weight where it is a part of the loss
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo", "cpo")


def of_prompts(name: str, prompts, leaves, b: float, e: float, sft: float = 0.0) -> torch.Tensor:
    """The mean over prompts of the mean over their pairs, and of the best response's likelihood."""
    total, rows = torch.zeros((), dtype=torch.float64), iter(leaves)
    for policy, reference in prompts:
        tokens = [
            (next(rows), torch.tensor(row, dtype=torch.float64)) for _, row in zip(policy, reference, strict=True)
        ]
        if name == "plackett_luce":
            pairs = [of_ranking(tokens, b)]
        else:
            pairs = [of_paper(name, one, other, b, e) for one, other in combinations(tokens, 2)]
        best = tokens[0][0]
        total = total + sum(pairs) / len(pairs) - (sft + LIKELIHOOD.get(name, 0.0)) * best.sum() / len(best)
    return total / len(prompts)


def drawn_prompts(seed: int) -> list:
    """Prompts with two or three responses of one to six tokens."""
    dice = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[float]:
        return (-3.0 * torch.rand(count, generator=dice, dtype=torch.float64) - 0.01).tolist()

    found = []
    for _ in range(4):
        lengths = torch.randint(1, 7, (2 + int(torch.randint(2, (1,), generator=dice)),), generator=dice).tolist()
        found.append(([tokens(n) for n in lengths], [tokens(n) for n in lengths]))
    return found


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[float]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [value for part, leaf in zip(found, leaves, strict=True)
            for value in (torch.zeros_like(leaf) if part is None else part).tolist()]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sft_coef", [0.0, 0.7])
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.rows == "ranked"])
def test_loss_and_gradients_of_each_token(name: str, sft_coef: float, seed: int):
    smoothing = 0.2 if name in SMOOTHED else 0.0
    beta = 2.0 if name == "simpo" else 0.4
    terms = objectives(name, beta, sft_coef, **({"label_smoothing": smoothing} if smoothing else {}))
    prompts = drawn_prompts(seed)
    responses, leaves = responses_of(prompts, terms[0])
    got = weighted_sum([preference_loss(responses, float(len(prompts)), how) for how in terms], terms)
    want = of_prompts(name, prompts, leaves, beta, smoothing, sft_coef)
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    assert gradients(got, leaves) == pytest.approx(gradients(want, leaves), rel=1e-9, abs=1e-12)


# beta 0.1 and no smoothing but where it is named. Loss; slope by each token of the better and of the worse response.
# Of the sums, m = 1: -log sigmoid(0.1) = 0.644397, slope -0.1 sigmoid(-0.1) = -0.047502. Of the means, 1/3 in place of
# 1: 0.676619, and a third of -0.1 sigmoid(-1/30).
HAND = [
    ("sigmoid", {}, 0.1, 0.644397, -0.047502, 0.047502),
    ("hinge", {}, 0.1, 0.9, -0.1, 0.1),
    # (1/3 - 5)^2, a third of 2 (1/3 - 5)
    ("ipo", {}, 0.1, 21.777778, -3.111111, 3.111111),
    # (0.9 x 0.644397 - 0.1 x 0.744397) / 0.8; -0.1 (0.9 sigmoid(-0.1) + 0.1 sigmoid(0.1)) / 0.8
    ("robust", {"label_smoothing": 0.1}, 0.1, 0.631897, -0.060002, 0.060002),
    # 1 - sigmoid(0.04) + sigmoid(-0.06); -0.1 of sigmoid's slope at 0.04, 0.1 of that at -0.06
    ("apo_zero", {}, 0.1, 0.975006, -0.024990, 0.024978),
    # sigmoid(0.04) + 1 - sigmoid(0.1); the slopes there, 0.249900 and 0.249376: of the better 0.1 of their difference
    ("apo_down", {}, 0.1, 0.985019, 0.0000524, 0.024938),
    ("sigmoid_norm", {}, 0.1, 0.676619, -0.016389, 0.016389),
    ("plackett_luce", {}, 0.1, 0.644397, -0.047502, 0.047502),  # of two, DPO
    # means -1 and -3.5/3, P = 0.367879 and 0.311403: log odds -0.541325 and -0.793567, their difference 0.252242, and
    # 0.1 x -log sigmoid of it 0.057496; with 1 for the likelihood, a third of whose slope is -1/3
    ("orpo", {}, 0.1, 1.057496, -1 / 3 - 0.069175 / 3, 0.063502 / 3),
    # -log sigmoid(0.1 x (-1 + 3.5/3) - 0.5), a third of -0.1 sigmoid(0.483333)
    ("simpo", {}, 0.1, 0.963735, -0.061853 / 3, 0.061853 / 3),
    ("simpo", {}, 2.0, 0.779949, -1.083141 / 3, 1.083141 / 3),
    # -log sigmoid(0.1 x (-3 + 3.5)) = 0.668460, slope -0.1 sigmoid(-0.05); and the likelihood
    ("cpo", {}, 0.1, 1.668460, -1 / 3 - 0.048750, 0.048750),
    ("cpo", {"cpo_alpha": 0.0}, 0.1, 0.668460, -0.048750, 0.048750),
    ("sft", {}, 0.1, 1.0, -1 / 3, 0.0),
]


@pytest.mark.parametrize(("name", "own", "beta", "loss", "better", "worse"), HAND)
def test_three_tokens_by_hand(name, own, beta, loss, better, worse):
    how = objective(name, beta, **own)
    responses, leaves = responses_of([(POLICY, REFERENCE)], how)
    got = preference_loss(responses, 1.0, how)
    assert got.item() == pytest.approx(loss, abs=6e-7)
    assert gradients(got, leaves) == pytest.approx([better] * 3 + [worse] * 3, abs=6e-7)


def test_every_loss_has_a_row_by_hand():
    assert {name for name, *_ in HAND} == {name for name, loss in LOSSES.items() if loss.rows == "ranked"}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.rows == "ranked"])
def test_parts_add_up_to_the_whole(name: str):
    """The prompts of a step in two micro-batches, each divided by the prompts of the step."""
    how = objective(name, 0.4)
    prompts = drawn_prompts(7)
    whole, *parts = (
        preference_loss(responses_of(part, how)[0], 4.0, how).item() for part in (prompts, prompts[:1], prompts[1:])
    )
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


def test_odds_near_one_and_near_zero():
    """float32: log(1 - P) is exact to rounding where P rounds to 1 or to 0, and P = 1 is finite and has no gradient."""
    for x in (-1e-6, -0.01, -0.6931, -0.6932, -30.0, -200.0):
        want = x - math.log(-math.expm1(x))
        assert log_odds(torch.tensor(x)).item() == pytest.approx(want, rel=1e-6, abs=1e-7)
    certain = torch.zeros(1, requires_grad=True)
    odds = log_odds(certain)
    odds.sum().backward()
    assert torch.isfinite(odds).all() and certain.grad.tolist() == [0.0]


def test_a_ranking_of_three_by_hand_and_far_log_ratios():
    """beta 0.5, log-ratios 1, 0, -1: ln(1 + e^-0.5 + e^-1) + ln(1 + e^-0.5) = ln 1.974410 + ln 1.606531.

    Slopes, with p the shares of the first sum (0.506480, 0.307196, 0.186324) and q of the second (0.622459, 0.377541):
    0.5 (p_1 - 1), 0.5 (p_2 + q_2 - 1), 0.5 (p_3 + q_3). Far ones stay finite: the wrong order of three costs its rank.
    """
    responses, leaves = responses_of([([[1.0], [0.0], [-1.0]], [[0.0]] * 3)], how := objective("plackett_luce", 0.5))
    loss = preference_loss(responses, 1.0, how)
    assert loss.item() == pytest.approx(0.680269 + 0.474077, abs=1e-6)
    assert gradients(loss, leaves) == pytest.approx([-0.246760, -0.035173, 0.281932], abs=1e-6)
    far = [([[-900.0], [900.0], [0.0]], [[0.0]] * 3), ([[900.0], [0.0], [-900.0]], [[0.0]] * 3)]
    responses, leaves = responses_of(far, how := objective("plackett_luce", 1.0))
    loss = preference_loss(responses, 2.0, how)
    assert loss.item() == pytest.approx((1800.0 + 0.0) / 2)
    assert all(math.isfinite(slope) for slope in gradients(loss, leaves))


def marked_responses(ratios, marks, point: float = 0.0) -> tuple[Responses, torch.Tensor]:
    ratios_B = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    columns = {"is_good": torch.tensor(marks, dtype=torch.float64)}
    given = Responses(ratios_B, ratios_B, ratios_B, none, none, torch.zeros(0), none, columns, reference_point=point)
    return given, ratios_B


# beta 0.1: a good response of log-ratio 0.4 and a bad one of -0.6. Loss; slopes.
MARKED_BY_HAND = [
    # 1 - sigmoid(0.04); 1 - sigmoid(0.06); slopes of 0.1 sigmoid's, 0.249900 and 0.249775
    ("kto", {}, 0.0, (0.490001, 0.485005), (-0.024990, 0.024978)),
    # 1 - sigmoid(0.1 x (0.4 - 0.3)); 1 - sigmoid(0.1 x (0.3 + 0.6))
    ("kto", {}, 0.3, (0.497500, 0.477515), (-0.024999, 0.024949)),
    ("kto", {"desirable_weight": 2.0, "undesirable_weight": 0.5}, 0.0, (0.980003, 0.242502), (-0.049980, 0.012489)),
    # -log sigmoid(0.04); -log sigmoid(0.06): together 1.336944
    ("bco", {}, 0.0, (0.673347, 0.663597), (-0.049000, 0.048500)),
    # half-way: -log sigmoid(0.05) each
    ("bco", {}, -0.1, (0.668460, 0.668460), (-0.048750, 0.048750)),
]


@pytest.mark.parametrize(("name", "own", "point", "losses", "slopes"), MARKED_BY_HAND)
def test_a_good_and_a_bad_response_by_hand(name, own, point, losses, slopes):
    how = objective(name, 0.1, **own)
    given, ratios_B = marked_responses([0.4, -0.6], [1.0, 0.0], point)
    loss = preference_loss(given, 2.0, how)
    loss.backward()
    assert loss.item() == pytest.approx(sum(losses) / 2, abs=6e-7)
    assert ratios_B.grad.tolist() == pytest.approx([slope / 2 for slope in slopes], abs=6e-7)
    alone = preference_loss(marked_responses([0.4], [1.0], point)[0], 1.0, how)
    assert alone.item() == pytest.approx(losses[0], abs=6e-7)


@pytest.mark.parametrize("seed", range(3))
def test_against_the_papers(seed):
    dice = torch.Generator().manual_seed(seed)
    ratios = (4 * torch.randn(9, generator=dice, dtype=torch.float64)).tolist()
    marks = (torch.rand(9, generator=dice) > 0.4).double().tolist()
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}

    def value(r: float, is_good: bool, z: float) -> float:
        """w (1 - v), v of equation 8, that is lambda - v where lambda = w."""
        weight = 1.3 if is_good else 0.7
        return weight - weight / (1 + math.exp(-0.5 * ((r - z) if is_good else (z - r))))

    def entropy(r: float, is_good: bool, z: float) -> float:
        probability = 1 / (1 + math.exp(-0.5 * (r - z)))
        return -math.log(probability if is_good else 1 - probability)

    for name, own, formula in (("kto", weights, value), ("bco", {}, entropy)):
        wanted = sum(formula(r, bool(mark), 0.8) for r, mark in zip(ratios, marks, strict=True)) / 9
        got = preference_loss(marked_responses(ratios, marks, 0.8)[0], 9.0, objective(name, 0.5, **own))
        assert got.item() == pytest.approx(wanted, rel=1e-12)


def totals(name, ratios, marks, cuts) -> float:
    """The reference point from sums over parts."""
    first_pass, sums = LOSSES[name].first_pass, {}
    for begin, end in zip([0, *cuts], [*cuts, len(ratios)], strict=True):
        for key, value in first_pass.sums(marked_responses(ratios[begin:end], marks[begin:end])[0]).items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return first_pass.point(sums)


@pytest.mark.parametrize("cuts", [[], [1], [3], [1, 2, 3], [0, 4]])
def test_points_of_any_parts(cuts):
    """Parts may be negative or empty: KTO's bound of 0 is put on the mean over all of them, and BCO's means are of
    sides, not of parts."""
    assert totals("kto", [-4.0, 6.0, -1.0, 5.0], [1.0] * 4, cuts) == pytest.approx(1.5)
    assert totals("kto", [-4.0, 3.0, -1.0, 0.0], [1.0] * 4, cuts) == 0.0
    # good: -4 and 6, mean 1; bad: -1 and 5, mean 2
    assert totals("bco", [-4.0, -1.0, 6.0, 5.0], [1.0, 0.0, 1.0, 0.0], cuts) == pytest.approx(1.5)
    assert totals("bco", [-4.0, -1.0, 6.0, 5.0], [1.0] * 4, cuts) == pytest.approx(1.5)
    assert totals("kto", [], [], []) == totals("bco", [], [], []) == 0.0


def test_the_figures():
    given, _ = marked_responses([2.0, 0.5, -3.0, 1.0, 0.7], [1.0, 1.0, 0.0, 0.0, 0.0], point=0.7)
    found = mark_figures(0.1 * given.ratios_B.detach(), given)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"pairs": 5, "right": 2, "chosen": 2, "rejected": 3, "chosen_reward": 0.25, "rejected_reward": -0.13}
    )


def test_the_pages_own_loss():
    page = (Path(__file__).parents[1] / "README.md").read_text().split("## Your own preference loss")[1]
    names: dict[str, Any] = {}
    exec(next(block.content for block in pages.blocks(page)), names)
    assert "preference_losses" in TABLES and isinstance(names["SQUARED_HINGE"], PreferenceLoss)
    margins_Q = torch.tensor([1.0, -3.0])
    how = Objective(names["SQUARED_HINGE"], beta=0.5)
    assert names["SQUARED_HINGE"].of_margins(margins_Q, how).tolist() == [0.25, 6.25]
