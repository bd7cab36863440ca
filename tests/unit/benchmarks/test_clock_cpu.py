"""Settings for runs beside the clock of a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.clock.cpu import Runs, costs_beside, costs_of, drawn_setting, sequences
from training.utils.clock.devices import DEVICES, HostCosts, Measured


def test_a_seed_is_a_setting():
    settings = [drawn_setting(seed) for seed in range(20)]
    assert settings == [drawn_setting(seed) for seed in range(20)] and len(set(settings)) == 20
    assert all(setting.width % 64 == 0 for setting in settings) and any(setting.recomputes for setting in settings)
    assert settings[0].name.startswith(f"{settings[0].width} wide, {settings[0].layers} layers")


def test_texts_fill_rows():
    setting = drawn_setting(3)
    texts = sequences(setting)
    assert len(texts) >= 12 * setting.rows and all(len(text.split()) == 2 * setting.tokens for text in texts)


def test_a_new_models_end_is_not_drawn(tmp_path):
    """The least of a thousand logits by far, behind any token."""
    from transformers import AutoModelForCausalLM

    runs = Runs(drawn_setting(0)._replace(width=128, layers=2, vocabulary=300, rows=1), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(runs.model)
    with torch.no_grad():
        logits = model(torch.randint(300, (8, 64), generator=torch.Generator().manual_seed(1))).logits
    shares = logits.softmax(-1)[..., model.config.eos_token_id]
    assert shares.max() < 1e-5


def test_costs_go_over_to_a_new_measurement():
    known, fresh = (
        replace(
            DEVICES["h100"], measured=Measured(((1.0, rate),), HostCosts(*range(9)), rate, rate, ((1, rate),), rate)
        )
        for rate in (1.0, 2.0)
    )
    fresh = replace(fresh, measured=fresh.measured._replace(costs=HostCosts(10, 11)))
    assert costs_of(known, fresh).measured == Measured(
        ((1.0, 2.0),), HostCosts(10, 11, 2, 3, 4, 5, 6, 7, 8), 2.0, 2.0, ((1, 1.0),), 1.0
    )


def test_seconds_beside_the_counted_work_are_a_steps_and_a_layers():
    """A step 5, a micro-step 2, a step for each layer 0.5, a micro-step for each layer 0.25, summed by hand."""
    seconds = {
        (1, 1): 5 + 2 + 0.5 + 0.25,
        (1, 4): 5 + 4 * 2 + 0.5 + 4 * 0.25,
        (9, 1): 5 + 2 + 9 * 0.5 + 9 * 0.25,
        (9, 4): 5 + 4 * 2 + 9 * 0.5 + 4 * 9 * 0.25,
    }
    assert costs_beside(seconds) == {"step": 5, "micro_step": 2, "layer": 0.5, "layer_micro_step": 0.25}


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        ({(1, 1): 4, (1, 4): 4, (9, 1): 4, (9, 4): 1}, "layer_micro_step"),
        ({(1, 1): 4, (1, 4): 4, (9, 1): 3, (9, 4): 3}, "layer"),
        ({(1, 1): 4, (1, 4): 3, (9, 1): 4, (9, 4): 3}, "micro_step"),
        ({(1, 1): -1, (1, 4): -1, (9, 1): -1, (9, 4): -1}, "step"),
    ],
)
def test_no_cost_is_less_than_nothing(seconds, name):
    """What noise makes negative counts as none."""
    assert costs_beside(seconds)[name] == 0.0
