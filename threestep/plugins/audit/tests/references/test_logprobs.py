"""Two logits by hand, and rounding to bf16 beside torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from threestep.plugins.audit.references.logprobs import logprobs, rounded_to_bfloat16

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("temperature", "probability"), [(1.0, 0.75), (0.5, 0.9)])
def test_two_logits_by_hand(temperature, probability):
    found = logprobs(np.array([[0.0, math.log(3.0)]]), np.array([1]), temperature)
    assert found == pytest.approx([math.log(probability)], abs=1e-12)


def test_large_logits_stay_finite():
    assert logprobs(np.array([[1000.0, 0.0]]), np.array([1]), 1.0) == pytest.approx([-1000.0])


def test_rounding_is_that_of_torch():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert rounded_to_bfloat16(values).tolist() == torch.from_numpy(values).bfloat16().double().tolist()
