"""Which values of a sample are trained on, and which are held out."""

from __future__ import annotations

from threestep.plugins.report.gaming.values import Values, values_of


def test_weights_of_0_and_the_checker_are_held_out():
    assert values_of("model:1.0", None) == Values((), ())
    assert values_of("model,judge:a/kind.yaml:0", "gsm8k") == Values((), ("reward/kind", "check"))
    assert values_of("model:2,length:0.5,f.py:mine:0", None) == Values(
        ("reward/model", "reward/length"), ("reward/mine",)
    )


def test_a_checker_that_is_trained_on_is_not_held_out():
    assert values_of("embedded", "embedded") == Values((), ())
    assert values_of("embedded:0,model", "embedded") == Values((), ("reward/embedded",))  # one value, counted once
