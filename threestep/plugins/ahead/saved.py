"""Rollouts as text, in which a checkpoint's JSON holds them: safetensors in base64, every bit as it was."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from threestep.plugins.replay.rollout_tensors import rollout_of, tensors_of
from training.step3_ppo.experience.dynamic_sampling import joined_rollouts

if TYPE_CHECKING:
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.engine.ranks.startup import Ranks

Saved = dict[str, Any]


def saved_rollouts(rollouts: Sequence[Rollout]) -> list[Saved]:
    """Return a rank's rollouts as JSON holds them."""
    found = []
    for rollout in rollouts:
        tensors, records = tensors_of(rollout)
        alone = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors refuses memory that is shared
        text = base64.b64encode(save(alone)).decode("ascii")
        found.append({"tensors": text, "conversations": records, "seconds": rollout.seconds})
    return found


def rollouts_of(
    saved_of_ranks: Sequence[Sequence[Saved]], requests: Sequence[RolloutRequest], ranks: Ranks
) -> list[Rollout]:
    """Return this rank's rollouts, one for each request, of those of the ranks that saved them. Prompts are dealt to
    ranks one by one, now as then."""
    if len(saved_of_ranks) == ranks.world_size:
        return [loaded_rollout(saved, ranks.device) for saved in saved_of_ranks[ranks.rank]]
    found = []
    for place, request in enumerate(requests):
        parts = [loaded_rollout(saved[place], ranks.device) for saved in saved_of_ranks]
        found.append(_dealt(parts, request, ranks))
    return found


def _dealt(parts: Sequence[Rollout], request: RolloutRequest, ranks: Ranks) -> Rollout:
    """Return the rollout of this rank's prompts. parts: of the ranks that drew."""
    each, own = request.samples_per_prompt, len(request.prompt_ids_BP)
    sizes = [len(part.response_lengths_B) // each for part in parts]
    numbers = list[int]()
    for index in range(own):
        place, rank = divmod(index * ranks.world_size + ranks.rank, len(parts))
        first = (sum(sizes[:rank]) + place) * each
        numbers += range(first, first + each)
    taken_B = torch.tensor(numbers, dtype=torch.int64, device=ranks.device)
    return joined_rollouts(parts, taken_B, request.sampling.pad_token_id)


def loaded_rollout(saved: Saved, device: torch.device) -> Rollout:
    """Return the rollout of which `saved_rollouts` gave this."""
    tensors = {name: tensor.to(device) for name, tensor in load(base64.b64decode(saved["tensors"])).items()}
    return rollout_of(tensors, saved["conversations"], float(saved["seconds"]))
