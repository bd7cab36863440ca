"""A model that is not trained: whole on every rank, or sharded under ZeRO-3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.utils.engine.config.config import engine_config
from training.utils.engine.out_of_memory import memory_explained, rows_in_words
from training.utils.engine.zero3 import limits_of, release_gathered
from training.utils.models.weights import buffers_kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import Ranks


class FrozenModel:
    """Calls a module without gradients. With ZeRO-3 settings its weights stay sharded between calls."""

    def __init__(self, module: nn.Module, settings: EngineSettings, ranks: Ranks) -> None:
        module.requires_grad_(False)
        module.eval()
        self._module = self._inside = module
        self._rank = ranks.rank
        if settings.zero_stage == 3:
            import deepspeed

            limits = limits_of(module, settings, ranks)
            config = engine_config(settings, ranks.world_size, 1, ranks.device.type == "cuda", limits=limits)
            config["zero_optimization"].pop("offload_optimizer", None)
            with buffers_kept(module):
                self._module, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
            self._module.eval()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self._inside.model  # type: ignore[return-value]

    @contextlib.contextmanager
    def whole(self, weights: list[nn.Parameter]) -> Iterator[None]:
        """Inside, `weights` of the model are whole, to be read. A collective under ZeRO-3; no forward of this model may
        run inside."""
        if self._module is self._inside:
            yield
            return
        import deepspeed

        release_gathered(self._module)
        with deepspeed.zero.GatheredParameters(weights):
            yield

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with memory_explained("a forward", self._rank, lambda: rows_in_words(*args[:1])):
            return self._module(*args, **kwargs)
