"""Step 3's records, made and changed by the names of their fields, whichever group these stand in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from training.step3_ppo.contracts.records import Corrected, Experience, Readings, Scored
from training.step3_ppo.contracts.settings import (
    DrawingSettings,
    EvaluationTimes,
    ExperienceSettings,
    LengthSettings,
    PpoSettings,
    ReadingSettings,
    ScoringSettings,
    UpdateSettings,
)
from training.utils.contracts.rollout_engine import Sampling
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout

_GROUPS = {
    ExperienceSettings: {"layout": SequenceLayout, "scoring": ScoringSettings, "reading": ReadingSettings},
    PpoSettings: {"drawing": DrawingSettings, "updates": UpdateSettings, "evaluation": EvaluationTimes},
}


def made(kind: type, **given: Any) -> Any:
    """Return settings of `kind`; each group from the fields that bear its fields' names."""
    for name, group in _GROUPS[kind].items():
        names = [field.name for field in dataclasses.fields(group) if field.name in given]
        given[name] = group(**{each: given.pop(each) for each in names})
    return kind(**given)


def changed(record: Any, **fields: Any) -> Any:
    """Return the record with these fields replaced, its own or those of records in it."""
    changes, own = {}, _fields(record)
    for name in own:
        if name in fields:
            changes[name] = fields.pop(name)
    for name in own:
        inner = {each for each in fields if _holds(getattr(record, name), each)}
        if inner:
            changes[name] = changed(getattr(record, name), **{each: fields.pop(each) for each in inner})
    assert not fields, f"{type(record).__name__} has no {sorted(fields)}"
    return record._replace(**changes) if isinstance(record, tuple) else dataclasses.replace(record, **changes)


def _fields(record: Any) -> Sequence[str]:
    return record._fields if isinstance(record, tuple) else [field.name for field in dataclasses.fields(record)]


def _holds(record: Any, name: str) -> bool:
    if type(record) not in _PARTS:
        return False
    own = _fields(record)
    return name in own or any(_holds(getattr(record, each), name) for each in own)


_PARTS = (
    Scored, Readings, Corrected, ExperienceSettings, LengthSettings, PlanSettings, Sampling,
    *(group for groups in _GROUPS.values() for group in groups.values()),
)  # fmt: skip


def made_experience(rollout: Any, **fields: Any) -> Experience:
    """Return an experience with these fields, its own or those of records in it; what is read by default is 0 or
    None. old_logprobs_BR: also what was read."""
    nothing_B = torch.zeros(len(rollout.response_lengths_B))
    nothing_BR = torch.zeros(rollout.drawn.mask_BR.shape)
    scores_B = fields.pop("scores_B", nothing_B)
    scored = Scored(scores_B, fields.pop("outcomes_B", scores_B), fields.pop("reward_parts", {}))
    old_BR = fields.pop("old_logprobs_BR", None)
    bare = Experience(
        rollout, scored, torch.ones_like(nothing_B).bool(), nothing_BR, nothing_BR, None, Readings(old_BR), old_BR,
        Corrected(),
    )  # fmt: skip
    return changed(bare, **fields)
