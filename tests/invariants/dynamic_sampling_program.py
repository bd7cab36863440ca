"""Launched on one, two or three ranks: runs GRPO with dynamic sampling under several seeds and numbers of tries.

Arguments: the folder of the models, a folder for the weights, and the cases as JSON, [[seed, tries], ...]; or two
numbers in place of the cases, all of so many seeds and tries. Each case writes the actor's weights to
OUT/SEED_TRIES_RANKS.pt. Report: {"SEED_TRIES": [counts of each rollout]}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = 6  # of a rollout, over all ranks
ITERATIONS = 2
STAGES = {1: 0, 2: 2, 3: 3}  # by ranks


def main(models: Path, out: Path, cases: list[list[int]]) -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    with started_process_group() as ranks:
        report({f"{seed}_{tries}": trained(models, out, ranks, seed, tries) for seed, tries in cases})


def trained(models: Path, out: Path, ranks: Any, seed: int, tries: int) -> list[dict[str, Any]]:
    """Rollouts with their updates, by a sampler that sees scores where the seed is odd; weights are written."""
    import torch

    from examples.curriculum import WorstAgain
    from tests.invariants import tiny
    from tests.invariants.ppo_program import SAMPLES, make_trainer
    from tests.support.step3_records import changed
    from threestep.plugins.curriculum.prompts import SampledPrompts
    from training.step3_ppo.contracts.rollouts import PromptSource
    from training.utils.engine.ranks.collectives import gathered

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
        torch.save(state, out / f"{seed}_{tries}_{ranks.world_size}.pt")
    return told


class EvenLength:
    """In place of a reward model: 1 for a sequence of an even number of tokens. A quarter of the groups is equal."""

    def __init__(self, model: Any) -> None:
        self.model = model  # whose precision the scores have

    def __call__(self, rows: Any) -> Any:
        return (rows.position_ids_NT.flatten()[rows.end_B] % 2).float()


def cases_of(words: list[str]) -> list[list[int]]:
    if len(words) == 1:
        return json.loads(words[0])
    seeds, tries = map(int, words)
    return [[seed, most] for seed in range(seeds) for most in range(1, tries + 1)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), cases_of(sys.argv[3:]))
