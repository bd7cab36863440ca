"""The replay of a model's routers as a run opens it: checked on the model's own probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from threestep.plugins.routers.replay import RouterReplay, check_replay, open_replay
from training.utils.layout.rows import packed_rows
from training.utils.models.own_forward import own_forward_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows


def checked_replay(
    model: PreTrainedModel, how: str, read: Callable[[TokenRows], torch.Tensor], device: torch.device
) -> RouterReplay | None:
    """Return the replay of a model in training, which follows what it is given; None without one. A collective. how:
    --replay_routers. read: TokenRows -> float32 [M], in eval mode."""
    replay, own = open_replay(model, how), own_forward_of(model)
    if replay is not None:
        assert own is not None, "it was checked on loading"
        rows = packed_rows([[own.probes.alone[0]]], 0).to(device)
        check_replay(replay, read, rows, own.tolerance)
    return replay
