"""Gradients, float32 weights and Adam's moments of the weights that an engine trains, each whole.

Where they are depends on DeepSpeed's optimizer: in the weights themselves (float32 at ZeRO stage 0), in copies beside
them (half precision there), or in one flat tensor of each group, of which a rank has a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from threestep.plugins.audit.recording.local_pieces import flat_weights
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.engine.training_engine import TrainingEngine

KINDS = ("gradient", "weight", "exp_avg", "exp_avg_sq")


def whole_states(engine: TrainingEngine, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, float32 tensor) for each trained weight. A collective under ZeRO; on every rank the same.

    kind: one of KINDS. Gradients are there inside `at_next_step`'s `before` alone; moments are 0 before the first
    update. ThreestepError for an optimizer of DeepSpeed's that this module does not know.
    """
    read = _reader(engine)
    for name, weight in engine.module.named_parameters():
        if not weight.requires_grad:
            continue
        if kind in ("exp_avg", "exp_avg_sq") and not engine.updates:
            yield name, torch.zeros(getattr(weight, "ds_shape", weight.shape))
            continue
        yield name, read(weight, kind).detach().float()


def at_next_step(engine: TrainingEngine, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` in the engine's next step, where gradients are those of all ranks and not yet clipped, and `after`
    when the weights are updated (deepspeed 0.19, engine.py: `step` reduces, then calls `_take_model_step`)."""
    deep = engine.engine
    original = deep._take_model_step

    def take(*args: Any) -> Any:
        del deep._take_model_step  # the method is in its place again
        before()
        result = original(*args)
        after()
        return result

    deep._take_model_step = take


def _reader(engine: TrainingEngine) -> Callable[[Any, str], torch.Tensor]:
    wrapper, stage = engine.engine.optimizer, engine.settings.zero_stage
    scale = float(getattr(wrapper, "loss_scale", 1.0)) if stage else 1.0
    if stage == 3:
        return lambda weight, kind: _at_stage3(wrapper, weight, kind, scale=scale)
    if stage:
        return lambda weight, kind: _of_partitions(wrapper, weight, kind, scale=scale)
    if isinstance(wrapper, torch.optim.Optimizer):
        return lambda weight, kind: _plain(wrapper, weight, weight, kind=kind)
    if hasattr(wrapper, "fp16_groups") and hasattr(wrapper, "fp32_groups"):
        pairs = zip(sum(wrapper.fp16_groups, []), sum(wrapper.fp32_groups, []), strict=True)
        masters = {weight: master for weight, master in pairs}
        return lambda weight, kind: _plain(wrapper.optimizer, weight, masters[weight], kind=kind)
    raise _unknown(wrapper)


def _unknown(wrapper: Any) -> ThreestepError:
    return ThreestepError(f"cannot read the optimizer's state: unknown DeepSpeed optimizer {type(wrapper).__name__}")


def _plain(optimizer: Any, weight: Any, master: Any, *, kind: str) -> torch.Tensor:
    """master: the tensor that the optimizer updates."""
    if kind == "gradient":
        return torch.zeros_like(weight) if weight.grad is None else weight.grad
    return master if kind == "weight" else optimizer.state[master][kind]


def _of_partitions(wrapper: Any, weight: Any, kind: str, *, scale: float) -> torch.Tensor:
    """Stages 1 and 2. A rank's part of a weight is a run of it, which stands in the rank's part of the flat group."""
    if kind == "gradient":
        return weight.get_full_hp_grad() / scale
    if kind == "weight":
        return weight.get_full_hp_param()
    flats = flat_weights(wrapper)
    if flats is None:
        raise _unknown(wrapper)
    flat_W = torch.zeros(weight.numel(), device=weight.device)
    part = weight._hp_mapping
    if part is not None:
        state = wrapper.optimizer.state[flats[part.param_group_index]][kind]
        source, target = part.hp_fragment_address, part.lp_fragment_address
        flat_W[target.start : target.start + target.numel].copy_(state[source.start : source.start + source.numel])
    dist.all_reduce(flat_W, group=weight._dp_group)
    return flat_W.view_as(weight)


def _at_stage3(wrapper: Any, weight: Any, kind: str, *, scale: float) -> torch.Tensor:
    if kind == "gradient":
        return wrapper.get_fp32_grad_for_param(weight) / scale
    return wrapper.get_full_hp_param(weight, None if kind == "weight" else kind)
