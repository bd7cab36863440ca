"""Settings for runs beside the clock of a CPU."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.clock import cpu
from benchmarks.clock.cpu import Runs, costs_beside, costs_of, drawn_setting, sequences, without_products
from threestep.plugins.plan.clock.devices import DEVICES, HostCosts
from threestep.plugins.plan.clock.roofline import WorkSeconds, work_seconds
from threestep.plugins.plan.clock.work import Matmul, Work
from threestep.plugins.plan.tests.flat_cpu import flat, host_costs


def test_a_seed_is_a_setting():
    settings = [drawn_setting(seed) for seed in range(20)]
    assert settings == [drawn_setting(seed) for seed in range(20)] and len(set(settings)) == 20
    assert all(setting.width % 64 == 0 for setting in settings) and any(setting.recomputes for setting in settings)
    assert settings[0].name.startswith(f"{settings[0].width} wide, {settings[0].layers} layers")


def test_texts_fill_rows():
    setting = drawn_setting(3)
    texts = sequences(setting)
    assert len(texts) >= 12 * setting.rows and all(len(text.split()) == 2 * setting.tokens for text in texts)


@pytest.mark.parametrize(("width", "layers"), [(128, 2), (384, 2), (128, 6)])
def test_a_new_models_end_is_not_drawn(width, layers, tmp_path):
    """The least of all logits by far, behind any token."""
    from transformers import AutoModelForCausalLM

    runs = Runs(drawn_setting(0)._replace(width=width, layers=layers, vocabulary=300, rows=1), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(runs.model)
    with torch.no_grad():
        logits = model(torch.randint(300, (8, 64), generator=torch.Generator().manual_seed(1))).logits
    shares = logits.softmax(-1)[..., model.config.eos_token_id]
    assert shares.max() < 1e-8


def test_costs_go_over_to_a_new_measurement():
    old, new = (flat(rate, HostCosts(*range(9)), optimizer=rate, head=rate, cached=rate) for rate in (1.0, 2.0))
    new = new._replace(costs=HostCosts(10, 11, token=(12, 14), drawn=13))
    known, fresh = (replace(DEVICES["h100"], measured=each) for each in (old, new))
    assert costs_of(known, fresh).measured == new._replace(costs=HostCosts(10, 11, 2, 3, (12, 14), 13, 6, 7, 8))


def test_runs_and_measurements_take_turns(monkeypatch):
    """Three turns: each kind once, then the CPU, which keeps what was known beside the models, and a rollout's seconds
    beside them. A prediction is the mean of those before and after the turn; by rates of 1, 2, 3 and 4 it is 1.5, 2.5
    and 3.5."""
    seen = []

    class Counted:
        def seconds_of(self, kind, steps):
            seen.append((kind, steps))
            return float(len(seen))

        def predicted(self, kind, device):
            assert device.measured.costs.step == 0.5
            assert device.measured.costs.rollout == seen.count("rollout")
            return device.measured.head_rate

    def device(rate, *costs):
        return replace(DEVICES["h100"], measured=flat(1e9, host_costs(1e-5, 2e-5, *costs), head=rate))

    def measured():
        seen.append("CPU")
        return device(1.0 + seen.count("CPU"))

    monkeypatch.setattr(cpu, "measured_cpu", measured)
    monkeypatch.setattr(cpu, "with_drawing", lambda device: device)

    def with_rollout(known):
        seen.append("rollout")
        costs = known.measured.costs._replace(rollout=float(seen.count("rollout")))
        return replace(known, measured=known.measured._replace(costs=costs))

    turns, last = cpu._in_turns(Counted(), ("sft", "dpo"), device(1.0, 0.5), with_rollout)
    assert last == device(4.0)
    assert seen == [("sft", 6), ("dpo", 6), "CPU", "rollout"] * 3
    assert turns == {"sft": [(1.0, 1.5), (5.0, 2.5), (9.0, 3.5)], "dpo": [(2.0, 1.5), (6.0, 2.5), (10.0, 3.5)]}
    assert turns["sft"][1].ratio == 0.5


def test_short_steps_are_many():
    """Besides the first two: 1.5 seconds of them, at least 4 and at most 22."""
    assert [cpu._steps_of(seconds) for seconds in (2.0, 0.15, 0.01)] == [6, 12, 24]


def test_products_can_be_left_out():
    """Nothing is left of matmuls and attention; a launch of 1e-5 seconds is."""
    work = Work(Counter({Matmul(1, 8, 64, 64): 100}), attention_flops=1e9, apart_flops=1e9, launches=1)
    device = without_products(replace(DEVICES["h100"], measured=flat(1e9, host_costs(1e-5, 2e-5))))
    assert work_seconds(work, device, dtype="fp32") == WorkSeconds(launches=1e-5)


def test_seconds_beside_are_those_without_products(monkeypatch, tmp_path):
    """A step of 10 seconds, of which 6 in products and attention, and 3 predicted of all else, leaves 1."""
    runs = Runs(drawn_setting(0)._replace(width=64, layers=1, vocabulary=300, rows=1), tmp_path)
    monkeypatch.setattr(runs, "_run", lambda kind, steps, further: (10.0, 6.0))
    monkeypatch.setattr(runs, "predicted", lambda kind, device: 3.0 if device.attention.forward == math.inf else 9.0)
    device = replace(DEVICES["h100"], measured=flat(1e9, host_costs(1e-5, 2e-5)))
    assert runs.seconds_beside(device) == 1.0


def test_a_run_tells_its_steps_and_what_operators_take_of_further_ones(tmp_path):
    runs = Runs(drawn_setting(0)._replace(width=64, layers=1, vocabulary=300, tokens=16, rows=1), tmp_path)
    seconds, products = runs._run("sft", 4, 3)
    assert 0 < products < seconds and runs._run("sft", 4)[1] == 0.0


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
