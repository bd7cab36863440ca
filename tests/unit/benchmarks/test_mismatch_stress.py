"""Rollouts that are wrong on purpose are wrong as they say, and in nothing else; the table of what they cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.mismatch_stress import NONE, Run, planned, read, table
from benchmarks.wrong_rollouts import WRONGS, rounded, weights_of, wrong_engine
from tests.support.tiny_models import tiny_causal_lm
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.engines.hf import TransformersRollout

SAMPLES = 3
SAMPLING = Sampling(max_new_tokens=6, temperature=1.0, top_k=0, top_p=1.0, end_token_id=-1, pad_token_id=0)


@pytest.fixture
def model():
    return tiny_causal_lm("llama")


def request(samples: int, temperature: float = 1.0) -> RolloutRequest:
    ids_BP = torch.tensor([[5, 6, 7], [9, 8, 7]])
    sampling = replace(SAMPLING, temperature=temperature)
    return RolloutRequest(ids_BP, torch.ones_like(ids_BP).bool(), sampling, list(range(2 * samples)), samples)


def same(one, other) -> bool:
    return torch.equal(one.response_ids_BR, other.response_ids_BR) and torch.equal(
        one.sampled_logprobs_BR, other.sampled_logprobs_BR
    )


def test_eight_bits_hold_255_numbers_a_row_or_three_bits_of_mantissa():
    """int8: steps of the row's largest / 127. e4m3: steps of 1/8 of a power of two, off by 1/16 at most."""
    weight = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    largest = weight.abs().amax(dim=1, keepdim=True)
    int8, fp8 = rounded(weight, "int8"), rounded(weight, "fp8")
    steps = int8 / (largest / 127)
    assert (steps - steps.round()).abs().max() < 1e-3 and ((int8 - weight).abs() <= largest / 254 * 1.001).all()
    large = weight.abs() > largest / 1000  # where e4m3 still has all bits of its mantissa
    assert ((fp8 - weight).abs() <= weight.abs() / 16 * 1.001)[large].all() and not torch.equal(fp8, weight)
    assert torch.equal(rounded(weight[0], "fp8"), weight[0])  # no matrix
    assert rounded(weight, None) is weight


@pytest.mark.parametrize("wrong", ["int8", "fp8", "hot", "old1"])
def test_evaluations_are_right_and_the_weights_stay(model, wrong):
    engine, right = wrong_engine(WRONGS[wrong], SAMPLES)(), TransformersRollout()
    before = weights_of(model)
    engine.roll_out(model, request(SAMPLES))
    assert same(engine.roll_out(model, request(1)), right.roll_out(model, request(1)))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_hot_rollout_is_one_at_that_temperature(model):
    engine, right = wrong_engine(WRONGS["hot"], SAMPLES)(), TransformersRollout()
    assert same(engine.roll_out(model, request(SAMPLES, 0.8)), right.roll_out(model, request(SAMPLES, 0.8 * 1.1)))


def test_old_weights_are_those_of_so_many_rollouts_before(model):
    engine, right = wrong_engine(WRONGS["old2"], SAMPLES)(), TransformersRollout()
    were = []
    for step in range(5):
        were.append(right.roll_out(model, request(SAMPLES)))
        assert same(engine.roll_out(model, request(SAMPLES)), were[max(0, step - 2)])
        with torch.no_grad():
            model.lm_head.weight.add_(
                torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(step))
            )
    assert not same(were[0], were[4])


def test_seeds_come_first_then_recipes(tmp_path):
    """So that what is done is always a table, of which further runs are the missing ones."""
    runs = planned([1, 2], [NONE, "decoupled_seq_is"], ["hot", "old8"])
    assert runs == [
        run
        for seed in (1, 2)
        for run in (
            Run(seed, NONE, "right"), Run(seed, NONE, "hot"), Run(seed, NONE, "old8"),
            Run(seed, "decoupled_seq_is", "hot"), Run(seed, "decoupled_seq_is", "old8"),
        )
    ]  # fmt: skip
    results = tmp_path / "results.jsonl"
    assert read(results) == [] and table([]) == "no run is done"
    scores = [0.9, 0.5, 0.4, 0.8, 0.7, 0.8]
    lines = [{**run._asdict(), "after": score} for run, score in zip(runs, scores, strict=False)]
    lines[0]["before"], lines[5]["before"] = 0.6, 0.7
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert table(read(results)).splitlines() == [
        "after SFT 0.650 (0.600, 0.700); rollouts that are right 0.850 (0.900, 0.800)",
        "",
        "| | temperature 1.1 | weights old by 8 |",
        "| --- | --- | --- |",
        "| `none` | 0.500 (0.500) | 0.400 (0.400) |",
        "| `decoupled_seq_is` | 0.800 (0.800) | 0.700 (0.700) |",
    ]
