"""Every loss on pairs from the log-probabilities of tokens: by hand, and against its paper in float64, line by line."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from tests.support.objectives import objective, objectives
from threestep.plugins.objectives.preferences import log_odds
from training.step2_dpo.loss import (
    LOSSES,
    Objective,
    Responses,
    best_likelihood,
    log_ratios,
    preference_loss,
    weighted_sum,
)

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


def test_the_best_responses_likelihood():
    # -(-6 / 3) and -(-2 / 4), of two prompts; the middle response is no best one.
    logprobs_B, none = torch.tensor([-6.0, -8.0, -2.0]), torch.zeros(0, dtype=torch.int64)
    tokens_B, best_B = torch.tensor([3.0, 1.0, 4.0]), torch.tensor([True, False, True])
    given = Responses(logprobs_B, logprobs_B, tokens_B, none, none, torch.zeros(0), best_B)
    assert best_likelihood(given).item() == pytest.approx(2.5)


def test_robust_dpo_is_unbiased():
    """Its mean over labels flipped with probability e is the loss of right labels."""
    e, m = 0.2, torch.tensor([0.7, -1.3], dtype=torch.float64)
    how = objective("robust", 0.5, label_smoothing=e)
    mean = (1 - e) * how.loss.of_margins(m, how) + e * how.loss.of_margins(-m, how)
    plain = objective("sigmoid", 0.5)
    torch.testing.assert_close(mean, plain.loss.of_margins(m, plain))


def test_losses_without_a_reference():
    assert {name for name, loss in LOSSES.items() if not loss.needs_reference} == {"orpo", "simpo", "cpo", "sft"}
