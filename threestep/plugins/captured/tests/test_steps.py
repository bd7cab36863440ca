"""Decode steps in fixed places give what a growing cache gives; on a GPU, graphs of them are tried first."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.taped_step import TapedStep
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding import test_decode_check, test_decoding, test_hf
from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_hf import (
    PLAIN,
    frequent_token,
    prompts,
    responses,
    roll,
    shapes_of_inputs,
)
from threestep.plugins.captured import steps
from threestep.plugins.captured.steps import CapturedStep, FixedSteps
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.generation.decoding import cache, decode_check
from training.utils.generation.decoding.decode_check import fitting_way, why_not_decoded
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS, Decoding
from training.utils.generation.decoding.hf import TransformersRollout


class Fixed(TransformersRollout):
    _way = FIXED


@pytest.fixture
def taped(monkeypatch):
    """Steps on a tape, and rooms that are outgrown after 16 columns."""
    monkeypatch.setattr(steps, "CapturedStep", TapedStep)
    monkeypatch.setattr(cache, "_ROOM_TOKENS", 4)
    monkeypatch.setattr(cache, "_ROOM_SHARE", 0.0)
    monkeypatch.setattr(TapedStep, "made", 0)


# gpt2: learned positions; opt: other ones; gemma2: windows of 8 in every second layer; gemma3_text: masks by kind.
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2", "gemma3_text"])
def test_fixed_places_give_what_a_growing_cache_gives(family, taped):
    """Padded prompts, two samples each, rows that leave, a room that is outgrown, windows that come round."""
    model = tiny_causal_lm(family, torch.float64)
    how = replace(PLAIN, max_new_tokens=30)
    how = replace(how, end_token_id=frequent_token(roll(model, how)))
    ids_BP, mask_BP = prompts()
    request = RolloutRequest(ids_BP, mask_BP, how, list(range(16)), 2)
    expected = TransformersRollout().roll_out(model, request)
    got, seen = shapes_of_inputs(model, lambda: Fixed().roll_out(model, replace(request)))
    assert responses(got) == responses(expected) and torch.equal(got.ended_B, expected.ended_B)
    torch.testing.assert_close(got.sampled_logprobs_BR, expected.sampled_logprobs_BR, rtol=0, atol=1e-6)
    assert 3 <= TapedStep.made < 15
    assert len(seen) == 1 + 2 * TapedStep.made  # the prompts, and two calls a capture: all else is replayed
    widths = [rows for rows, _ in seen[1:]]
    assert widths == sorted(widths, reverse=True) and widths[0] == 16
    assert widths[-1] < 16 or family.startswith("gemma")  # fewer than half of whose rows end


def test_what_a_graph_cannot_hold_is_found(taped, monkeypatch):
    """A mask that the host counts out stands still in a graph: the check at the start sees other log-probabilities. A
    question to the device within a forward."""
    model, own = known("llama")
    assert why_not_decoded(model, own, FIXED) is None
    attend, layers, calls = torch.nn.functional.scaled_dot_product_attention, len(model.model.layers), []

    def counting(query, key, value, **others):
        calls.append(1)
        return attend(query, key, value, **others) * (1 + 0.05 * (len(calls) // layers))

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        assert "its log-probabilities differ by " in (why_not_decoded(model, own, FIXED) or "")
    plain = model.model.norm.forward
    monkeypatch.setattr(model.model.norm, "forward", lambda hidden: plain(hidden) * (1 if hidden.isnan().any() else 1))
    said = why_not_decoded(model, own, FIXED) or ""
    assert "its forward fails (RuntimeError: the host waits for _local_scalar_dense)" in said


def test_the_prompts_cache_is_given_up_layer_by_layer(monkeypatch):
    """Never two whole caches: the height of a rollout would be the prompts' keys and values twice."""
    alive, standing = [], []
    assert not FixedSteps.leave_now([True, False, False, False])  # rows leave together
    assert FixedSteps.leave_now([True, True, False, False]) and FixedSteps.leave_now([True])

    class Layer(steps.FixedLayer):
        def __init__(self, held, columns):
            if not alive:
                alive.extend(weakref.ref(layer.keys) for layer in decoding.cache.layers)
            super().__init__(held, columns)
            del held
            standing.append(sum(keys() is not None for keys in alive))

    monkeypatch.setattr(steps, "FixedLayer", Layer)
    model = tiny_causal_lm("llama")
    ids_BP, mask_BP = prompts()
    decoding = Decoding(model, RolloutRequest(ids_BP, mask_BP, PLAIN, list(range(16)), 2), FIXED)
    with torch.no_grad():
        decoding.prefill(2)
    layers = len(model.model.layers)
    assert layers > 1 and standing == list(range(layers, 0, -1))


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


def test_on_a_cpu_each_call_is_an_ordinary_one():
    place, calls = torch.zeros(2), []

    def function() -> torch.Tensor:
        calls.append(1)
        return place + 1

    step = CapturedStep(function, torch.device("cpu"))
    assert calls == []
    place.fill_(3.0)
    assert step().tolist() == [4.0, 4.0]
    place.add_(1.0)
    assert CapturedStep(function, torch.device("cpu"), step)().tolist() == [5.0, 5.0] and len(calls) == 2
