"""Which value of an evaluated figure is better."""

from __future__ import annotations

from training.utils.run.metrics import greater_wins


def test_a_loss_is_better_when_it_is_less():
    names = ("eval/loss", "eval/perplexity", "eval/reward")
    assert [greater_wins(name) for name in names] == [False, False, True]
    assert greater_wins("eval/loss", True) and not greater_wins("eval/reward", False)
