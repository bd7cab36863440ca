"""Dynamic sampling draws the same prompts, counts the same and trains the same weights on one, two and three ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.curriculum import WorstAgain
from tests.invariants import tiny
from tests.invariants.ppo_program import SAMPLES, make_trainer
from tests.support.step3_records import changed
from threestep.plugins.curriculum.prompts import SampledPrompts
from training.step3_ppo.contracts.rollouts import PromptSource
from training.utils.engine.ranks.collectives import gathered

PROMPTS = 6  # of a rollout, over all ranks
ITERATIONS = 2
STAGES = {1: 0, 2: 2, 3: 3}  # by ranks


def on_ranks(
    ranks: Any, models: Path, out: Path, is_long: bool, cases: list[list[int]]
) -> dict[str, list[dict[str, Any]]]:
    """Run GRPO with dynamic sampling under seeds and numbers of tries, [[seed, tries], ...]. Return {"SEED_TRIES":
    counts of each rollout}; the actor's weights are OUT/SEED_TRIES.pt."""
    return {f"{seed}_{tries}": trained(models, out, ranks, seed, tries) for seed, tries in cases}


def trained(models: Path, out: Path, ranks: Any, seed: int, tries: int) -> list[dict[str, Any]]:
    """Rollouts with their updates, by a sampler that sees scores where the seed is odd; weights are written."""
    trainer = make_trainer(
        models, out, ranks, STAGES[ranks.world_size], grpo=True, epochs=1, decay=0.0, with_texts=False,
        packed=ranks.world_size == 2,
        # Of the gradients' own size: far above it, Adam's first step is their sign, also where they are rounding.
        changed=lambda flags: dataclasses.replace(flags, adam_epsilon=1e-3),
    )  # fmt: skip
    prompts = tiny.prompts(3 * PROMPTS, seed=seed)
    trainer.prompt_source = PromptSource(prompts, seed)
    if seed % 2:
        trainer.prompt_source = SampledPrompts(prompts, WorstAgain(prompts, seed), None, lambda rollout: (), ranks)
    trainer.roles = dataclasses.replace(trainer.roles, reward_model=EvenLength(trainer.roles.reward_model.model))
    per_rank = PROMPTS // ranks.world_size
    trainer.settings = changed(
        trainer.settings, prompts_per_batch=per_rank, sequences_per_minibatch=per_rank * SAMPLES, seed=seed,
        dynamic_sampling_tries=tries,
    )  # fmt: skip
    trainer.updates.settings = trainer.settings
    told = []
    for iteration in range(1, ITERATIONS + 1):
        asked, seeds = trainer.next_prompts(iteration, batch=0)
        drawn = trainer.replace_equal_groups(trainer.score(asked, trainer.roll_out(asked, seeds)), iteration, 0)
        experience = trainer.experience_of(drawn.samples, iteration)
        trainer.prompt_source.observe(drawn.samples, drawn.left_out)
        trainer.learn([experience], iteration)
        places = zip(*gathered([row.row_id for row in drawn.samples.rows]), strict=True)
        told.append({**drawn.counts.figures(), "prompts": [row for place in places for row in place]})
    state = trainer.roles.actor.full_state(trainer.roles.actor_model)
    if ranks.is_main:
        torch.save(state, out / f"{seed}_{tries}.pt")
    return told


class EvenLength:
    """In place of a reward model: 1 for a sequence of an even number of tokens. A quarter of the groups is equal."""

    def __init__(self, model: Any) -> None:
        self.model = model  # whose precision the scores have

    def __call__(self, rows: Any) -> Any:
        return (rows.position_ids_NT.flatten()[rows.end_B] % 2).float()


LARGEST_DIFFERENCE = 2.5e-4  # of the largest change


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([[3, 1], [4, 3]], id="two"),
        pytest.param([[seed, most] for seed in range(20) for most in range(1, 6)], id="every", marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_trains_the_same(launched, models, cases):
    launches = [launched("test_dynamic_sampling_exact", size, cases=cases) for size in (1, 2, 3)]
    reports = [each[0] for _, each in launches]
    counted = {"replaced": 0.0, "kept_equal": 0.0, "dropped": 0.0}
    for seed, tries in cases:
        name = f"{seed}_{tries}"
        assert reports[0][name] == reports[1][name] == reports[2][name], name
        for told in reports[0][name]:
            counted = {each: count + told[f"dynamic_sampling/{each}"] for each, count in counted.items()}
        one, *others = (torch.load(out / f"{name}.pt") for out, _ in launches)
        change = largest_change(models, one)
        assert change > 1e-3, name  # or nothing is compared
        for other in others:
            apart = max(float((other[key] - one[key]).abs().max()) for key in one)
            assert apart < LARGEST_DIFFERENCE * change, (name, apart / change)
    assert min(counted.values()) > 0, counted


def largest_change(models: Path, state: dict[str, torch.Tensor]) -> float:
    start = load_file(models / "actor" / "model.safetensors")
    return max(float((state[key] - start[key]).abs().max()) for key in state)
