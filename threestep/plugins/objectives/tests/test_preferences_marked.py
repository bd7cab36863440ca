"""KTO and BCO: by hand, against their papers in float64, and their reference points."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.objectives import objective
from training.step2_dpo.loss import LOSSES, Responses, mark_figures, preference_loss


def responses(ratios, marks, point: float = 0.0) -> tuple[Responses, torch.Tensor]:
    ratios_B = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    columns = {"is_good": torch.tensor(marks, dtype=torch.float64)}
    given = Responses(ratios_B, ratios_B, ratios_B, none, none, torch.zeros(0), none, columns, reference_point=point)
    return given, ratios_B


# beta 0.1: a good response of log-ratio 0.4 and a bad one of -0.6. Loss; slopes.
HAND = [
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


@pytest.mark.parametrize(("name", "own", "point", "losses", "slopes"), HAND)
def test_a_good_and_a_bad_response_by_hand(name, own, point, losses, slopes):
    how = objective(name, 0.1, **own)
    given, ratios_B = responses([0.4, -0.6], [1.0, 0.0], point)
    loss = preference_loss(given, 2.0, how)
    loss.backward()
    assert loss.item() == pytest.approx(sum(losses) / 2, abs=6e-7)
    assert ratios_B.grad.tolist() == pytest.approx([slope / 2 for slope in slopes], abs=6e-7)
    alone = preference_loss(responses([0.4], [1.0], point)[0], 1.0, how)
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
        got = preference_loss(responses(ratios, marks, 0.8)[0], 9.0, objective(name, 0.5, **own))
        assert got.item() == pytest.approx(wanted, rel=1e-12)


def totals(name, ratios, marks, cuts) -> float:
    """The reference point from sums over parts."""
    first_pass, sums = LOSSES[name].first_pass, {}
    for begin, end in zip([0, *cuts], [*cuts, len(ratios)], strict=True):
        for key, value in first_pass.sums(responses(ratios[begin:end], marks[begin:end])[0]).items():
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


def test_points_of_nothing():
    assert totals("kto", [], [], []) == totals("bco", [], [], []) == 0.0


def test_the_figures():
    given, _ = responses([2.0, 0.5, -3.0, 1.0, 0.7], [1.0, 1.0, 0.0, 0.0, 0.0], point=0.7)
    found = mark_figures(0.1 * given.ratios_B.detach(), given)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"pairs": 5, "right": 2, "chosen": 2, "rejected": 3, "chosen_reward": 0.25, "rejected_reward": -0.13}
    )


def test_losses_of_marks():
    assert [name for name, loss in LOSSES.items() if loss.rows == "marked"] == ["kto", "bco"]
    assert [name for name, loss in LOSSES.items() if loss.first_pass] == ["kto", "bco"]
