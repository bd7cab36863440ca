"""A thousand random sets of conversations that fork, under DeepSpeed: the losses and gradients of actor and critic are
those of plain PyTorch on their parts, one by one in float64, and each conversation is trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.invariants.ppo_program import STAGES

PROGRAM = Path(__file__).with_name("forks_program.py")
TRIES = 1000
RUNS = [(world_size, stage) for world_size in (1, 2) for stage in STAGES]
LOSS, GRADIENT = 1e-6, 1e-5  # in float32; of the gradient's norm


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "stage"), RUNS)
def test_a_step_on_forks_is_that_of_their_parts(models, tmp_path, world_size: int, stage: int):
    seeds = range(RUNS.index((world_size, stage)), TRIES, len(RUNS))
    words = [models, tmp_path, stage, seeds.start, seeds.stop, seeds.step]
    found = run_ranks(PROGRAM, world_size, words, timeout_seconds=3000.0)[0]
    assert sorted(map(int, found)) == list(seeds)
    for seed, apart in found.items():
        assert apart["untrained"] == 0, seed
        assert max(apart["actor/clip_fraction"], apart["critic/clip_fraction"]) < 1e-6, (seed, apart)
        assert max(apart["actor loss"], apart["critic loss"]) < LOSS, (seed, apart)
        assert max(apart["actor gradient"], apart["critic gradient"]) < GRADIENT, (seed, apart)
    for role in ("actor", "critic"):  # both sides of the clips are met
        clipped = [apart[f"{role}/clip_fraction of it"] for apart in found.values()]
        assert 0.1 < sum(clipped) / len(clipped) < 0.7
