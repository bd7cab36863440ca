"""On a GPU graphs are tried first; what is drawn in fixed places is what every other way draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.utils.generation.decoding import test_decode_check, test_decoding, test_hf
from tests.unit.utils.generation.decoding.test_decode_check import known
from threestep.plugins.captured import steps
from training.utils.generation.decoding import decode_check
from training.utils.generation.decoding.decode_check import fitting_way
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS


class _OnAGpu:
    """A model that says it is on a GPU, and computes here."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    device = SimpleNamespace(type="cuda")


def test_on_a_gpu_graphs_are_tried_first(monkeypatch):
    """A family that cannot be captured says why, once, and is decoded as on a CPU."""
    monkeypatch.setattr(
        "training.utils.generation.decoding.decode_check.request_of", on_the_cpu(decode_check.request_of)
    )
    model, own = known("llama")
    assert fitting_way(_OnAGpu(model), own) == (FIXED, [])
    with monkeypatch.context() as patched:
        patched.setattr(decode_check, "captured_steps", lambda: None)
        assert fitting_way(_OnAGpu(model), own) == (MASKED, [])
    model, own = known("mixtral")
    monkeypatch.setattr(steps, "CapturedStep", refused)
    way, notes = fitting_way(_OnAGpu(model), own)
    assert way == MASKED and len(notes) == 1
    assert notes[0].startswith(
        "warning: _OnAGpu rolls out without captured graphs, which is slower: its forward fails ("
    )
    model, own = known("bloom")
    way, notes = fitting_way(_OnAGpu(model), own)
    assert way == WAYS[0] and len(notes) == 1


def on_the_cpu(made: Any) -> Any:
    return lambda cases, device: made(cases, torch.device("cpu"))


def refused(*_: Any) -> Any:
    raise RuntimeError("called a synchronizing CUDA operation")


def test_fixed_places_draw_the_same_tokens():
    test_decode_check.test_every_way_draws_the_same_tokens(FIXED)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rollouts_in_fixed_places_are_those_of_one_forward(family):
    test_decoding.test_rollouts_are_those_of_one_forward(family, FIXED)


def test_looking_seldom_for_ends_in_fixed_places_gives_the_same_bits(monkeypatch):
    test_hf.test_looking_seldom_for_ends_gives_the_same_bits(monkeypatch, FIXED)
