"""A rollout as named tensors and the records of its conversations, as files and checkpoints hold it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from training.utils.contracts.rollout import ConversationRecord, Conversations, DrawnExperts, DrawnPaths, Rollout

if TYPE_CHECKING:
    import torch

OF_PATHS = ("inserted_BR", "positions_B")
_OF_TURNS = ("inserted_BR", "fork_begins_BR", "turn_rewards_BR")
_OF_EXPERTS = ("prompt_BPLK", "response_BRLK")
_OTHERS = ("seconds", "media", "inserted", "experts")
TENSORS = tuple(field.name for field in dataclasses.fields(Rollout) if field.name not in _OTHERS)


def tensors_of(rollout: Rollout) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return every tensor by its name, on the CPU, without media; and the records of conversations as JSON, None where
    there are none."""
    fields = {name: getattr(rollout, name) for name in TENSORS}
    records = None
    if rollout.paths is not None:
        fields |= {name: getattr(rollout.paths, name) for name in OF_PATHS}
    if rollout.conversations is not None:
        fields |= {name: getattr(rollout.conversations, name) for name in _OF_TURNS}
        records = json.dumps([dataclasses.asdict(each) for each in rollout.conversations.records])
    if rollout.experts is not None:
        fields |= {name: getattr(rollout.experts, name) for name in _OF_EXPERTS}
    return {name: tensor.cpu().contiguous() for name, tensor in fields.items()}, records


def rollout_of(columns: Mapping[str, torch.Tensor], records: str | None, seconds: float = 0.0) -> Rollout:
    """Return the rollout of which `tensors_of` gave these."""
    own: dict[str, Any] = {name: columns[name] for name in TENSORS}
    if _OF_EXPERTS[0] in columns:
        own["experts"] = DrawnExperts(*(columns[name] for name in _OF_EXPERTS))
    rollout = Rollout(**own, seconds=seconds)
    if records is not None:
        found = tuple(ConversationRecord(**each) for each in json.loads(records))
        turns = Conversations(found, *(columns[name] for name in _OF_TURNS))
        return dataclasses.replace(rollout, inserted=turns)
    if OF_PATHS[-1] in columns:
        return dataclasses.replace(rollout, inserted=DrawnPaths(*(columns[name] for name in OF_PATHS)))
    return rollout
