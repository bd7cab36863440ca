"""A rollout as named tensors and the records of its conversations, as files and checkpoints hold it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from training.utils.contracts.rollout import ConversationRecord, Conversations, DrawnPaths, Rollout

if TYPE_CHECKING:
    import torch

OF_PATHS = ("inserted_BR", "positions_B")
_OF_TURNS = ("inserted_BR", "fork_begins_BR", "turn_rewards_BR")
_OTHERS = ("seconds", "media", "paths", "conversations")
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
    return {name: tensor.cpu().contiguous() for name, tensor in fields.items()}, records


def rollout_of(columns: Mapping[str, torch.Tensor], records: str | None, seconds: float = 0.0) -> Rollout:
    """Return the rollout of which `tensors_of` gave these."""
    own: dict[str, Any] = {name: columns[name] for name in TENSORS}
    rollout = Rollout(**own, seconds=seconds)
    if records is not None:
        found = tuple(ConversationRecord(**each) for each in json.loads(records))
        turns = Conversations(found, *(columns[name] for name in _OF_TURNS))
        return dataclasses.replace(rollout, conversations=turns)
    if OF_PATHS[-1] in columns:
        return dataclasses.replace(rollout, paths=DrawnPaths(*(columns[name] for name in OF_PATHS)))
    return rollout
