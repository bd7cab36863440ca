"""What drawing costs, from seconds of steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.clock import drawing
from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.clock.work import Matmul, TrainingWork, Work
from threestep.plugins.plan.tests.flat_cpu import flat, host_costs

CPU = replace(DEVICES["h100"], measured=flat(1e9, host_costs(1e-5, 5e-6)))
TOKEN, LOGIT, OPERATOR, PRODUCT, RATE, CACHE_RATE = 3e-4, 2e-8, 7e-6, 4e-6, 5e9, 4e9


def test_parts_of_a_step_are_told_apart(monkeypatch):
    """Steps of 34 operators a layer and 16 besides, 20 ns for each of a row's logits, and products at 5 GFLOP/s
    and 4 us for each of 7 a layer and one besides: the parts come back."""

    def seconds(engine, model, rows, prompt):
        config = model.config
        weights = sum(part.numel() for part in model.parameters()) - config.vocab_size * config.hidden_size
        operators = 16 + 34 * config.num_hidden_layers
        cached = rows * drawing.cache_bytes(config, 1, 1, 4) * (prompt - drawing._PROMPT) / CACHE_RATE
        products = 0.0
        if config.hidden_size > 8:
            products = 2 * weights * rows / RATE + PRODUCT * (1 + 7 * config.num_hidden_layers)
        return TOKEN + LOGIT * rows * config.vocab_size + OPERATOR * operators + products + cached

    def work(model, rows, tokens, targets):
        layers = model.config.num_hidden_layers
        products = Counter({Matmul(1, rows, 64, 64): 7 * layers})
        return TrainingWork(Work(products, launches=16 + 34 * layers), Work(), Work())

    monkeypatch.setattr(drawing, "training_work", work)
    monkeypatch.setattr(drawing, "_step_seconds", seconds)
    monkeypatch.setattr(drawing, "_engine", lambda model: (None, model))
    measured = drawing.with_drawing(CPU).measured
    token = pytest.approx(TOKEN), pytest.approx(LOGIT)
    assert measured.costs == host_costs(1e-5, 5e-6, token=token, drawn=pytest.approx(OPERATOR))
    points = tuple((rows, pytest.approx(RATE)) for rows in drawing._ROWS)
    assert [rates for _, rates in measured.thin] == [points, points, points]
    layers = 4 * 320**2 + 3 * 320 * 848 + 2 * 320  # attention, MLP and norms of a layer
    assert [size for size, _ in measured.thin] == [512 * 320 + 320 + count * layers for count in (1, 3, 6)]
    assert measured.thin_products == tuple((rows, pytest.approx(PRODUCT)) for rows in drawing._ROWS)
    assert measured.cache_rate == pytest.approx(CACHE_RATE)


def test_a_step_is_timed():
    engine, model = drawing._engine(drawing._model(8, 1, 512))
    torch.manual_seed(0)
    assert 0 < drawing._step_seconds(engine, model, 2, 8) < 1
