"""Groups whose samples all score the same teach nothing and are replaced by groups of other prompts.

DAPO (Yu et al. 2025, section 3.2), with a limit: after the last try the remaining groups stay. All ranks together have
one batch, whose prompts are dealt to them one by one, and so are a try's prompts: a place's prompt and its samples
depend on the seed, the place and the try, and not on the number of ranks.

B sequences, G groups (prompts). A place is a group's number in the batch of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from training.step3_ppo.contracts.records import LeftOut, Samples, Scored
from training.utils.contracts.rollout import Conversations, DrawnExperts, FormedResponses, Rollout
from training.utils.engine.ranks.collectives import gathered, several_ranks

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import ExperienceSettings


def equal_groups(outcomes_B: torch.Tensor, samples_per_prompt: int) -> torch.Tensor:
    """Return bool [G], True where all samples of a prompt have the same outcome."""
    outcomes_Gn = outcomes_B.view(-1, samples_per_prompt)
    return (outcomes_Gn == outcomes_Gn[:, :1]).all(dim=1)


@dataclass(frozen=True)
class GroupCounts:
    """Groups of all ranks. replaced: places that another prompt took. kept_equal: places whose group is equal after the
    last try. dropped: groups that were drawn to replace others and were equal too."""

    replaced: int = 0
    kept_equal: int = 0
    dropped: int = 0

    def __add__(self, other: GroupCounts) -> GroupCounts:
        return GroupCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def figures(self) -> dict[str, float]:
        return {f"dynamic_sampling/{each.name}": float(getattr(self, each.name)) for each in fields(self)}


class DrawnGroups(NamedTuple):
    """The samples that a batch trains on, and those that it leaves out. samples, left_out: of this rank."""

    samples: Samples
    left_out: tuple[LeftOut, ...] = ()
    counts: GroupCounts = GroupCounts()


def with_differing_groups(
    samples: Samples, draw: Callable[[int, int], Samples], tries: int, settings: ExperienceSettings
) -> DrawnGroups:
    """Return the samples with equal groups replaced, as far as `tries` draws find groups that differ. A collective.

    draw(attempt, prompts): this rank's samples of that many prompts, its share of the attempt's. Rollouts are
        collectives, so every rank draws the same number; those beyond the number that all ranks lack are dropped.
    """
    ranks, rank, each = settings.layout.plan.ranks, settings.layout.rank, settings.samples_per_prompt
    left_out: list[LeftOut] = []
    counts = GroupCounts()
    for attempt in range(tries):
        gaps = places_of(gathered(equal_groups(samples.scored.outcomes_B, each).tolist()))
        counts = replace(counts, kept_equal=len(gaps))
        if not gaps:
            break
        fresh = draw(attempt, -(-len(gaps) // ranks))
        is_equal = equal_groups(fresh.scored.outcomes_B, each).tolist()
        usable = [place for place in places_of(gathered([not equal for equal in is_equal])) if place < len(gaps)]
        taken = dict(zip(gaps, usable, strict=False))  # there are no more of the second
        replaced = [place // ranks for place in taken if place % ranks == rank]
        dropped = [own for own, equal in enumerate(is_equal) if equal and own * ranks + rank < len(gaps)]
        for order, (groups, source) in enumerate(((replaced, samples), (dropped, fresh))):
            found = _picked([source], groups, settings)
            keys = [(attempt, order, group * ranks + rank) for group in groups]
            left_out.append(LeftOut(keys, found.rows, found.rollout, found.scored.scores_B))
        samples = _filled(samples, fresh, taken, settings)
        counts = counts + GroupCounts(len(taken), -len(taken), len(gaps) - len(usable))
    return DrawnGroups(samples, tuple(left_out), counts)


def places_of(flags_of_ranks: Sequence[Sequence[bool]]) -> list[int]:
    """Return the places of the groups whose flag is True, in order. flags_of_ranks: of each rank's groups."""
    ranks = len(flags_of_ranks)
    return sorted(
        index * ranks + rank
        for rank, flags in enumerate(flags_of_ranks)
        for index, is_one in enumerate(flags)
        if is_one
    )


def _filled(samples: Samples, fresh: Samples, taken: dict[int, int], settings: ExperienceSettings) -> Samples:
    """Return this rank's samples with the groups at the places of `taken` replaced, each by the fresh group of that
    number among all ranks'. A collective."""
    ranks, rank = settings.layout.plan.ranks, settings.layout.rank
    sources = [[place for place in taken.values() if place % ranks == other] for other in range(ranks)]
    own = _picked([fresh], [place // ranks for place in sources[rank]], settings)
    parts = [samples, *_from_all_ranks(own, samples.rollout.response_lengths_B.device)]
    numbers = {place: len(samples.rows) + at for at, place in enumerate(chain.from_iterable(sources))}
    groups = list(range(len(samples.rows)))
    for gap, place in taken.items():
        if gap % ranks == rank:
            groups[gap // ranks] = numbers[place]
    found = _picked(parts, groups, settings)
    return replace(found, rollout=replace(found.rollout, seconds=samples.rollout.seconds + fresh.rollout.seconds))


def _from_all_ranks(own: Samples, device: torch.device) -> list[Samples]:
    """Return every rank's samples, in the order of ranks, with their tensors on `device`. A collective."""
    if not several_ranks():
        return [own]
    cpu = torch.device("cpu")
    parts = gathered((own.rows, _moved(own.rollout, cpu), _moved(own.scored, cpu)))
    return [Samples(rows, _moved(rollout, device), partial(_moved, scored, device)) for rows, rollout, scored in parts]


def _moved(value: Any, device: torch.device) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _picked(parts: Sequence[Samples], groups: Sequence[int], settings: ExperienceSettings) -> Samples:
    """Return the groups of these numbers, counted through all parts."""
    rows = [row for part in parts for row in part.rows]
    each, device = settings.samples_per_prompt, parts[0].rollout.response_lengths_B.device
    numbers = [group * each + sample for group in groups for sample in range(each)]
    taken_B = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = [part.scored for part in parts]

    def reward(name: str) -> torch.Tensor:
        none = float("nan")
        return torch.cat([own.parts.get(name, torch.full_like(own.scores_B, none)) for own in every])[taken_B]

    scored = Scored(
        scores_B=torch.cat([own.scores_B for own in every])[taken_B],
        outcomes_B=torch.cat([own.outcomes_B for own in every])[taken_B],
        parts={name: reward(name) for name in dict.fromkeys(name for own in every for name in own.parts)},
    )
    rollout = joined_rollouts([part.rollout for part in parts], taken_B, settings.layout.pad_token_id)
    return Samples(tuple(rows[group] for group in groups), rollout, lambda: scored)


def joined_rollouts(parts: Sequence[Rollout], taken_B: torch.Tensor, pad_token_id: int) -> Rollout:
    """Return the sequences of these numbers, counted through all parts, padded to one width; prompts on the left."""
    joined: dict[str, Any] = {"seconds": sum(part.seconds for part in parts)}
    if any(part.media is not None for part in parts):
        spans = [own for part in parts for own in part.media or ((),) * len(part.response_lengths_B)]
        joined["media"] = tuple(spans[index] for index in taken_B.tolist())
    if parts[0].formed is not None:  # one engine drew all: all have a form, or turns, or none
        joined["inserted"] = FormedResponses(**_joined_columns([part.formed for part in parts], taken_B, pad_token_id))
    if parts[0].conversations is not None:
        records = [record for part in parts for record in part.records]
        columns = _joined_columns([part.conversations for part in parts], taken_B, pad_token_id)
        joined["inserted"] = Conversations(tuple(records[index] for index in taken_B.tolist()), **columns)
    if parts[0].experts is not None:
        joined["experts"] = DrawnExperts(**_joined_columns([part.experts for part in parts], taken_B, pad_token_id))
    return Rollout(**_joined_columns(parts, taken_B, pad_token_id), **joined)


def _joined_columns(parts: Sequence[Any], taken_B: torch.Tensor, pad_token_id: int) -> dict[str, Any]:
    """Return every tensor of records of one type, by name, padded and joined."""
    joined = {}
    for name in (field.name for field in fields(parts[0])):
        values = [getattr(part, name) for part in parts]
        if not isinstance(values[0], torch.Tensor):
            continue
        if values[0].dim() >= 2:
            width = max(value.shape[1] for value in values)
            missing = [width - value.shape[1] for value in values]
            behind = (0, 0) * (values[0].dim() - 2)
            sides = [(*behind, more, 0) if "_BP" in name else (*behind, 0, more) for more in missing]  # left of prompts
            filling = pad_token_id if "_ids_" in name else 0
            values = [pad(value, side, value=filling) for value, side in zip(values, sides, strict=True)]
        joined[name] = torch.cat(values)[taken_B]
    return joined
