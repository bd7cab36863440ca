"""A rollout as named tensors and the records of its conversations, as files and checkpoints hold it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json
from training.utils.contracts.rollout import (
    CUTS,
    ConversationRecord,
    Conversations,
    DrawnExperts,
    FormedResponses,
    Rollout,
)

OF_FORM = ("inserted_BR", "positions_B")
_OF_TURNS = ("inserted_BR", "fork_begins_BR", "turn_rewards_BR")
ASKED = ("asked_ids_BP", "asked_mask_BP")  # the prompts of the request, where environments began with others
_OF_EXPERTS = ("prompt_BPLK", "response_BRLK")
_OTHERS = ("seconds", "media", "inserted", "experts")
TENSORS = tuple(field.name for field in dataclasses.fields(Rollout) if field.name not in _OTHERS)


def tensors_of(rollout: Rollout) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return every tensor by its name, on the CPU, without media; and the records of conversations as JSON, None where
    there are none."""
    fields = {name: getattr(rollout, name) for name in TENSORS}
    records = None
    if rollout.formed is not None:
        fields |= {name: getattr(rollout.formed, name) for name in OF_FORM}
    if rollout.conversations is not None:
        fields |= {name: getattr(rollout.conversations, name) for name in _OF_TURNS}
        records = json.dumps([dataclasses.asdict(each) for each in rollout.conversations.records])
    if rollout.experts is not None:
        fields |= {name: getattr(rollout.experts, name) for name in _OF_EXPERTS}
    return {name: tensor.cpu().contiguous() for name, tensor in fields.items()}, records


_KINDS = {"ids": torch.int64, "mask": torch.bool, "lengths": torch.int64, "logprobs": torch.float32} | {
    "ended": torch.bool, "inserted": torch.bool, "begins": torch.bool, "rewards": torch.float32, "seeds": torch.int64,
}  # fmt: skip


def check_tensors(columns: Mapping[str, torch.Tensor], where: object, records: str | None) -> None:
    """ThreestepError for a tensor that is missing, of another type than its name says, or of sizes that do not fit the
    others'; for places beyond a row; and for other records than one of each conversation."""
    groups = ((OF_FORM, "positions_B" in columns), (_OF_EXPERTS, bool(columns.keys() & set(_OF_EXPERTS))))
    for names, is_there in (*groups, ((*_OF_TURNS, *ASKED), records is not None)):
        if is_there and not columns.keys() >= set(names):
            raise ThreestepError(f"{where} must have the tensors {', '.join(names)}, got {', '.join(columns)}")
    sizes: dict[str, int] = {}
    for name, values in columns.items():
        words, _, axes = name.rpartition("_") if name != "seeds" else (name, "", "B")
        wanted = _KINDS.get(words.rpartition("_")[2], values.dtype)
        prompt = words.partition("_")[0] if axes == "BP" else ""  # those that were asked may have another length
        shape = [
            sizes.setdefault(axis if axis != "P" else f"P of {prompt}", size)
            for axis, size in zip(axes, values.shape, strict=False)
        ]
        if values.dtype != wanted or values.ndim != len(axes) or list(values.shape) != shape:
            raise ThreestepError(f"{where}: {name} expects {wanted} {shape}, got {values.dtype} {list(values.shape)}")
    lengths_B, most = columns["response_lengths_B"], sizes["R"]
    if ((lengths_B < 1) | (lengths_B > most)).any() or min(_least(columns, name) for name in _IDS) < 0:
        raise ThreestepError(f"{where} must have responses of 1 to {most:,} tokens and non-negative token ids")
    mask_BP, is_there_BR = columns["prompt_mask_BP"], torch.arange(most) < lengths_B.unsqueeze(1)
    if (mask_BP[:, :-1] & ~mask_BP[:, 1:]).any() or columns["sampled_logprobs_BR"].isnan().any():
        raise ThreestepError(f"{where} must have left-padded prompts and log-probabilities that are not NaN")
    if "inserted_BR" in columns and not (is_there_BR & ~columns["inserted_BR"]).any(dim=1).all():
        raise ThreestepError(f"{where} must have at least one generated token in each response")
    if (records is None) != (_OF_TURNS[1] not in columns):
        raise ThreestepError(f"{where} must have a record of each conversation")
    if records is not None:
        found = _records_in(records, f"{where}, conversations")
        if len(found) != len(lengths_B) or (columns["fork_begins_BR"] & ~is_there_BR).any():
            raise ThreestepError(f"{where} must have a record of each conversation, with forks inside the responses")


_IDS = ("prompt_ids_BP", "response_ids_BR")


def _least(columns: Mapping[str, torch.Tensor], name: str) -> int:
    return int(columns[name].min()) if columns[name].numel() else 0


def _records_in(text: str, where: object) -> tuple[ConversationRecord, ...]:
    found = tuple(checked_json(list[ConversationRecord], text, where))
    for record in found:
        if record.turns < 1 or record.forks < 0 or record.cut not in (None, *CUTS):
            raise ThreestepError(
                f"{where} must have turns, forks and cut, where cut is one of {', '.join(CUTS)}, or null"
            )
    return found


def rollout_of(columns: Mapping[str, torch.Tensor], records: str | None, seconds: float = 0.0) -> Rollout:
    """Return the rollout of which `tensors_of` gave these."""
    own: dict[str, Any] = {name: columns[name] for name in TENSORS}
    if _OF_EXPERTS[0] in columns:
        own["experts"] = DrawnExperts(*(columns[name] for name in _OF_EXPERTS))
    rollout = Rollout(**own, seconds=seconds)
    if records is not None:
        turns = Conversations(
            _records_in(records, "the records of conversations"), *(columns[name] for name in _OF_TURNS)
        )
        return dataclasses.replace(rollout, inserted=turns)
    if OF_FORM[-1] in columns:
        return dataclasses.replace(rollout, inserted=FormedResponses(*(columns[name] for name in OF_FORM)))
    return rollout
