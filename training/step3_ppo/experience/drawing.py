"""Part 2 of the loop: the responses to a batch of prompts, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.utils.contracts.rollout_engine import RolloutRequest, Sampling, rolled_out

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.data.rows.collate import PromptBatch
    from training.utils.layout.rank_share import SequenceLayout


def draw_responses(
    engine: RolloutEngine,
    roles: Roles,
    prompts: PromptBatch,
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    layout: SequenceLayout,
) -> Rollout:
    """Return a response for each seed, equally many to each prompt and adjacent, from the actor's current weights. A
    collective."""
    request = request_for(prompts, sampling, seeds, layout, device=roles.actor.ranks.device)
    with engine.lent(roles.whole_actor) as model:
        return rolled_out(engine, model, request)


def request_for(
    prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int], layout: SequenceLayout, *, device: torch.device
) -> RolloutRequest:
    """Return what an engine is asked for: a response for each seed, equally many to each prompt and adjacent."""
    ids_BP, mask_BP = prompts.prompt_ids_BP.to(device), prompts.prompt_mask_BP.to(device)
    count = len(seeds) // len(prompts.rows)
    return RolloutRequest(ids_BP, mask_BP, sampling, seeds, count, prompts.rows, layout.media_of(prompts.rows))
