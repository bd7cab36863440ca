"""One seed, many streams."""

from __future__ import annotations

import json
import random

import numpy
import torch

from training.utils.base.seeds import derived_seed, random_state, seed_everything, set_random_state


def test_a_stream_is_its_name():
    # Written down once: a run must draw the same after an update.
    assert derived_seed(1234, "rollout", 0) == 5746214188259390988
    assert derived_seed(1234, "rollout", 0) == derived_seed(1234, "rollout", 0)


def test_streams_differ_and_fit_every_generator():
    seeds = {derived_seed(seed, name, index) for seed in (1, 2) for name in ("a", "b") for index in range(100)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    for seed in seeds:
        torch.Generator().manual_seed(seed)


def test_everything_is_seeded_and_ranks_differ():
    def draw(seed: int, rank: int) -> tuple[float, float, float]:
        seed_everything(seed, rank)
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    assert draw(1, 0) == draw(1, 0)
    for other in (draw(1, 1), draw(2, 0)):
        assert all(one != two for one, two in zip(draw(1, 0), other, strict=True))


def test_random_numbers_go_on_from_a_state_that_went_through_json():
    seed_everything(5, rank=0)

    def draws():
        return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()

    draws()
    state = json.loads(json.dumps(random_state()))
    expected = draws()
    assert draws() != expected
    set_random_state(state)
    assert draws() == expected
