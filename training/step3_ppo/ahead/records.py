"""Records of rollouts that are drawn ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutRequest, ServerShare
    from training.utils.data.rows.collate import PromptBatch


class Asked(NamedTuple):
    """The prompts of a step's rollouts on this rank, one entry for each of them, and what is asked for them."""

    prompts: Sequence[PromptBatch]
    requests: Sequence[RolloutRequest]


class Times(NamedTuple):
    """Seconds since 1970: when a step's rollouts were asked for, and when drawing began and ended on this rank."""

    asked: float
    began: float
    ended: float


@dataclass(frozen=True)
class RolloutsOfStep:
    """The rollouts of a step on this rank. version: steps that the weights had taken, the oldest where they differ.
    waited: seconds of the loop. times: None where a checkpoint had the rollouts. groups: position and version of each
    prompt, where they are no function of the step; pending: positions that wait for the steps to come. shares: of the
    servers that drew them, without those that a checkpoint had."""

    step: int
    version: int
    prompts: Sequence[PromptBatch]
    rollouts: Sequence[Rollout]
    waited: float = 0.0
    times: Times | None = None
    groups: Sequence[tuple[int, int]] = ()
    pending: Sequence[int] = ()
    shares: Mapping[str, ServerShare] = field(default_factory=dict)
