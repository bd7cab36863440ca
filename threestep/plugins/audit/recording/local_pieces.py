"""This rank's pieces of an engine's weights and of Adam's first moment, at any ZeRO stage: no weight is gathered.

The pieces of all ranks together are the whole model, each number once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from training.utils.engine.training_engine import TrainingEngine

_MOMENT = "exp_avg"
# Of DeepSpeed's optimizer for stages 1 and 2, and of that for stage 1 in bf16 with float32 gradients.
_FLAT_WEIGHTS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")


class LocalPiece(NamedTuple):
    """A part of the weight `name`. weight: the optimizer's own, float32 also where the model computes in bf16. moment:
    None before the first step, and for a weight that is frozen."""

    name: str
    weight: torch.Tensor
    moment: torch.Tensor | None


def trained_pieces(engine: TrainingEngine) -> Iterator[LocalPiece]:
    """Yield this rank's pieces of the trained weights; where all ranks have them whole, those of rank 0 alone.
    Nothing of an optimizer of DeepSpeed's that is not known here."""
    wrapper = engine.engine.optimizer
    adam = getattr(wrapper, "optimizer", wrapper)
    weights = dict(engine.module.named_parameters())
    if engine.settings.zero_stage == 0:
        if engine.ranks.is_main:
            for names, group in zip(engine.parameter_groups, adam.param_groups, strict=True):
                for name, master in zip(names, group["params"], strict=True):
                    yield LocalPiece(name, master.detach(), adam.state.get(master, {}).get(_MOMENT))
        return
    for name in (name for group in engine.parameter_groups for name in group):
        place = _place(engine, wrapper, weights[name])
        if place is not None:
            flat, start, count = place
            moment = adam.state.get(flat, {}).get(_MOMENT)
            own = None if moment is None else moment.detach().view(-1).narrow(0, start, count)
            yield LocalPiece(name, flat.detach().view(-1).narrow(0, start, count), own)


def frozen_pieces(engine: TrainingEngine) -> Iterator[LocalPiece]:
    """Yield this rank's pieces of the weights that are not trained."""
    is_main, is_sharded = engine.ranks.is_main, engine.settings.zero_stage == 3
    parameters: dict[str, Any] = dict(engine.module.named_parameters())
    for name, weight in parameters.items():
        if weight.requires_grad or not (is_main or is_sharded):
            continue
        if not is_sharded:
            yield LocalPiece(name, weight.detach(), None)
        elif count := _real(engine, weight):
            yield LocalPiece(name, weight.ds_tensor.detach().view(-1).narrow(0, 0, count), None)


def _place(engine: TrainingEngine, wrapper: Any, weight: Any) -> tuple[torch.Tensor, int, int] | None:
    """The place of a weight in the optimizer's flat tensors: the tensor, the first number, how many; None: none of it
    is on this rank (deepspeed 0.19: stage_1_and_2.py, stage3.py)."""
    if engine.settings.zero_stage == 3:
        if not hasattr(wrapper, "grad_position"):
            return None
        group, start, _ = wrapper.grad_position[wrapper.get_param_id(weight)]
        count = _real(engine, weight)
        return (wrapper.fp32_partitioned_groups_flat[group], start, count) if count else None
    mapping = getattr(weight, "_hp_mapping", None)
    flats = flat_weights(wrapper)
    if mapping is None or flats is None:
        return None
    address = mapping.get_hp_fragment_address()
    return flats[mapping.param_group_index], address.start, address.numel


def flat_weights(wrapper: Any) -> list[torch.Tensor] | None:
    """This rank's share of the float32 weights, by parameter group, at stages 1 and 2; None for an optimizer of
    DeepSpeed's that is not known here."""
    return next((getattr(wrapper, name) for name in _FLAT_WEIGHTS if hasattr(wrapper, name)), None)


def _real(engine: TrainingEngine, weight: Any) -> int:
    """Numbers of this rank's share of a weight under ZeRO-3: the last ranks' shares end in padding."""
    share = weight.ds_tensor.ds_numel
    return max(0, min(share, weight.ds_numel - engine.ranks.rank * share))
