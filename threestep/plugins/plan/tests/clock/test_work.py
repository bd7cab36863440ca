"""Work adds up."""

from __future__ import annotations

from collections import Counter

from threestep.plugins.plan.clock.work import Matmul, Work


def test_a_matmul_by_hand():
    product = Matmul(batch=2, rows=3, columns=5, inner=7)
    assert product.flops == 2 * 2 * 3 * 5 * 7 and product.elements == 2 * (21 + 35 + 15)


def test_layers_are_extrapolated():
    """One layer beside an embedding, and two: the difference is a layer; four of them and the embedding."""
    product = Matmul(1, 2, 2, 2)
    one = Work(Counter({product: 1}), 10.0, 5.0, 4.0, 3)
    two = Work(Counter({product: 2}), 20.0, 8.0, 6.0, 5)
    four = one.plus(two.plus(one, -1), 3)
    assert four == Work(Counter({product: 4}), 40.0, 14.0, 10.0, 9)
    assert four.matmul_flops == 4 * 16
