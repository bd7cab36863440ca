"""Groups whose samples all score the same teach nothing and are replaced by groups of other prompts.

DAPO (Yu et al. 2025, section 3.2), with a limit: after the last try the remaining groups stay. Every rank makes the
same number of tries with the same number of prompts, since rollouts are collectives.

B sequences, G groups (prompts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch.nn.functional import pad

from training.step3_ppo.records import Samples, Scored
from training.step3_ppo.settings import ExperienceSettings
from training.utils.engine.collectives import largest
from training.utils.generation.records import Rollout


def equal_groups(outcomes_B: torch.Tensor, samples_per_prompt: int) -> torch.Tensor:
    """Return bool [G], True where all samples of a prompt have the same outcome."""
    outcomes_Gn = outcomes_B.view(-1, samples_per_prompt)
    return (outcomes_Gn == outcomes_Gn[:, :1]).all(dim=1)


def with_differing_groups(
    samples: Samples, draw: Callable[[int, int], Samples], tries: int, settings: ExperienceSettings
) -> Samples:
    """Return the samples with equal groups replaced, as far as `tries` draws find groups that differ.

    draw(attempt, prompts): samples of that many other prompts. Every rank asks for the same number, that of the rank
    that lacks most, and drops what it has too many.
    """
    device = samples.rollout.response_lengths_B.device
    for attempt in range(tries):
        equal = torch.nonzero(equal_groups(samples.scored.outcomes_B, settings.samples_per_prompt)).flatten().tolist()
        wanted = largest(len(equal), device)
        if wanted == 0:
            break
        fresh = draw(attempt, wanted)
        usable = torch.nonzero(~equal_groups(fresh.scored.outcomes_B, settings.samples_per_prompt)).flatten().tolist()
        groups = list(range(len(samples.rows)))
        for place, found in zip(equal, usable, strict=False):  # the shorter list decides
            groups[place] = len(samples.rows) + found
        samples = _picked(samples, fresh, groups, settings)
    return samples


def _picked(first: Samples, second: Samples, groups: list[int], settings: ExperienceSettings) -> Samples:
    """Return the groups of these numbers, counted through both."""
    rows = (*first.rows, *second.rows)
    each, device = settings.samples_per_prompt, first.rollout.response_lengths_B.device
    taken = torch.tensor([group * each + sample for group in groups for sample in range(each)], device=device)
    one, two = first.scored, second.scored

    def part(name: str) -> torch.Tensor:
        none_B = [torch.full_like(scored.scores_B, float("nan")) for scored in (one, two)]
        return torch.cat([one.parts.get(name, none_B[0]), two.parts.get(name, none_B[1])])[taken]

    scored = Scored(
        scores_B=torch.cat([one.scores_B, two.scores_B])[taken],
        outcomes_B=torch.cat([one.outcomes_B, two.outcomes_B])[taken],
        parts={name: part(name) for name in {**one.parts, **two.parts}},
    )
    return Samples(
        rows=tuple(rows[group] for group in groups),
        rollout=_joined(first.rollout, second.rollout, taken, settings.pad_token_id),
        collect=lambda: scored,
    )


def _joined(first: Rollout, second: Rollout, taken_B: torch.Tensor, pad_token_id: int) -> Rollout:
    """Return the sequences of these numbers, counted through both, padded to one width; prompts on the left."""
    parts: dict[str, Any] = {"seconds": first.seconds + second.seconds}
    records = (*(first.conversations or ()), *(second.conversations or ()))
    parts["conversations"] = tuple(records[index] for index in taken_B.tolist()) if records else None
    parts["images"] = None
    if first.images is not None or second.images is not None:
        spans = [own for part in (first, second) for own in part.images or ((),) * len(part.response_lengths_B)]
        parts["images"] = tuple(spans[index] for index in taken_B.tolist())
    for name in (field.name for field in fields(Rollout) if field.name not in parts):
        one, two = getattr(first, name), getattr(second, name)
        if one is None and two is None:  # one engine drew both: neither has paths, or turns
            continue
        if one.dim() == 2:
            width = max(one.shape[1], two.shape[1])
            value = pad_token_id if "_ids_" in name else 0
            missing = [(width - part.shape[1], 0) for part in (one, two)]  # on the left of prompts
            sides = missing if name.endswith("_BP") else [pair[::-1] for pair in missing]
            one, two = (pad(part, side, value=value) for part, side in zip((one, two), sides, strict=True))
        parts[name] = torch.cat([one, two])[taken_B]
    return Rollout(**parts)
