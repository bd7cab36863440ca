"""Rollout engines, one file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable

from training.step3_ppo.rollout.base import Decode, RolloutEngine
from training.step3_ppo.rollout.hf import TransformersRollout
from training.step3_ppo.rollout.hybrid import HybridRollout
from training.step3_ppo.rollout.replay import DumpingRollout, ReplayRollout
from training.step3_ppo.rollout.vllm import VllmRollout

# Made from the tokenizer's decode; VllmRollout from its flags and the longest sequence too.
ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "hf": TransformersRollout,
    "hybrid": HybridRollout,
    "vllm": VllmRollout,
}


def make_engine(
    kind: Callable[[Decode | None], RolloutEngine], decode: Decode, dump: str | None, replay: str | None, rank: int
) -> RolloutEngine:
    """Return an engine of `kind`, its rollouts written to the folder `dump` where there is one; or, where there is a
    folder `replay`, the engine that reads them."""
    if replay is not None:
        return ReplayRollout(replay, rank)
    engine = kind(decode)
    return engine if dump is None else DumpingRollout(engine, dump, rank)
