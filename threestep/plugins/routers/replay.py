"""Replay of the rollout's routers in training: the experts that computed a token when it was drawn compute it again.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (R3, arXiv
2510.11370), section 3: the choice is the rollout's, the weights are the softmax of the training router's own logits
over it, so that the router has its gradient. With two experts of weights p_i = softmax(logits)_i, the choice {a, b}
gives y = (p_a E_a(x) + p_b E_b(x)) / (p_a + p_b) in a family that normalizes them.

Families compute their choice by one `torch.topk` in each layer with experts, whose result is changed while the layer
runs: nothing else of a family is known, and `check_replay` finds out whether a model follows. The choice goes to each
layer as an argument, so that a recomputed layer (gradient checkpointing) has it too.

L layers, t tokens (slots of rows), K experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from threestep.plugins.routers.expert_log import ExpertLog, recording_way
from threestep.plugins.routers.routers import experts_per_token, has_routers
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import UNKNOWN
from training.utils.models.families import language_part
from training.utils.models.own_forward import rms
from training.utils.models.row_sharing import ROW_PART, WHOLE_ROWS, RowPart
from training.utils.models.token_model import EXPERTS, TAKES_EXPERTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.generation.decoding.decoding import DecodeWay

_SEAT = "_threestep_experts"  # of a layer


class _Seat(TorchFunctionMode):
    """The choice of experts in one layer, number `place` of its model.

    follows: a choice that is given is taken. keeps: one's own is kept. calls: of topk, so far, for one of `experts`.
    wanted: int16 [t, K] of this forward; None where none is given.
    own: int64 [t, K], the last; differs: bool [t], True where its set is not the given one.
    part: of the rows, which the last forward was of.
    """

    def __init__(self, place: int, top_k: int, follows: bool) -> None:
        super().__init__()
        self.place, self.top_k, self.follows, self.keeps = place, top_k, follows, False
        self.calls = self.experts = 0
        self.wanted: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        self.differs: torch.Tensor | None = None
        self.part: RowPart = WHOLE_ROWS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.shape[-1] != self.top_k:
            return result
        scores = args[0] if args else kwargs["input"]
        self.calls, self.experts = self.calls + 1, scores.shape[-1]
        own = result.indices.flatten(0, -2)
        self.own = own.detach() if self.keeps else None
        if self.wanted is None:
            return result
        wanted = pad(self.wanted, (0, 0, 0, len(own) - len(self.wanted)), value=UNKNOWN).long()
        is_given = (wanted >= 0).all(dim=-1, keepdim=True)
        self.differs = (is_given & (own.sort(-1).values != wanted.sort(-1).values)).any(dim=-1)
        if not self.follows:
            return result
        chosen = torch.where(is_given, wanted, own).view_as(result.indices)
        return type(result)((scores.gather(-1, chosen), chosen))


def _enter(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    seat: _Seat = layer.__dict__[_SEAT]
    given, seat.part = kwargs.pop(EXPERTS, None), kwargs.get(ROW_PART, WHOLE_ROWS)
    seat.wanted = None if given is None else given.flatten(0, 1)[:, seat.place]
    seat.__enter__()
    return args, kwargs


def _leave(layer: nn.Module, args: Any, output: Any) -> None:
    seat: _Seat = layer.__dict__[_SEAT]
    seat.__exit__(None, None, None)
    seat.wanted = None


def _seats(model: PreTrainedModel, follows: bool) -> list[_Seat]:
    """Return the seat of each layer of a model, which gets them if it has none."""
    layers = layers_of(model)
    for place, layer in enumerate(layers):
        if _SEAT not in layer.__dict__:
            layer.__dict__[_SEAT] = _Seat(place, experts_per_token(model), follows)
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)
    return [layer.__dict__[_SEAT] for layer in layers]


def layers_of(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The transformer blocks of a model, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in language_part(model).modules() if isinstance(part, GradientCheckpointingLayer)]


@dataclass(frozen=True)
class RouterReplay:
    """The choice of experts of a model in training. follows: the given one is taken; otherwise it is compared alone."""

    model: PreTrainedModel
    follows: bool

    @contextlib.contextmanager
    def recorded(self, model: PreTrainedModel) -> Iterator[Callable[[], torch.Tensor]]:
        """Inside, each forward of `model`, the trained one or a copy of it, is recorded. Yield what returns that of the
        last, int16 [T, L, K]: of all slots of its rows, one row after the other."""
        seats = _seats(model, self.follows)
        for seat in seats:
            seat.keeps = True
        try:
            yield lambda: _taken(seats)
        finally:
            for seat in seats:
                seat.keeps, seat.own = False, None

    def way(self, way: DecodeWay, name: str) -> DecodeWay:
        """See `ExpertRecord`."""
        return recording_way(way, name)

    @contextlib.contextmanager
    def logged(self, model: PreTrainedModel, request: RolloutRequest) -> Iterator[ExpertLog]:
        """See `ExpertRecord`."""
        with self.recorded(model) as last:
            yield ExpertLog(last, request)

    def differing(self) -> torch.Tensor | None:
        """See `ExpertRecord`."""
        found, part = list[torch.Tensor](), WHOLE_ROWS
        for seat in _seats(self.model, self.follows):
            if seat.differs is not None:
                found.append(seat.differs)
                part = seat.part
            seat.differs = None
        return part.whole_slots(torch.stack(found).any(dim=0)) if found else None


def _taken(seats: Sequence[_Seat]) -> torch.Tensor:
    """int16 [t, L, K] of the last forward, of whole rows; UNKNOWN in a layer without experts."""
    known = [seat.own for seat in seats if seat.own is not None]
    assert known, "no forward has been recorded"
    own_tLK = torch.stack(
        [torch.full_like(known[0], UNKNOWN) if seat.own is None else seat.own for seat in seats], dim=1
    )
    return seats[0].part.whole_slots(own_tLK.to(torch.int16))


def open_replay(model: PreTrainedModel, how: str) -> RouterReplay | None:
    """Return the replay of a model in training; None without one. how: --replay_routers.

    Raises ThreestepError for a model without routers, and for one whose layers are not as others'.
    """
    if how == "none":
        return None
    name = type(model).__name__
    if not has_routers(model):
        raise ThreestepError(
            f"--replay_routers {how} needs a mixture of experts whose routers transformers can record, but {name} "
            "has none; leave --replay_routers out"
        )
    if len(layers_of(model)) != model.config.get_text_config().num_hidden_layers:
        raise ThreestepError(
            f"--replay_routers {how} sets the experts of each layer, but {name} has {len(layers_of(model))} blocks "
            f"for {model.config.get_text_config().num_hidden_layers} layers; leave --replay_routers out"
        )
    replay = RouterReplay(model, follows=how == "follow")
    _seats(model, replay.follows)
    setattr(model, TAKES_EXPERTS, True)
    return replay


def check_replay(
    replay: RouterReplay, read: Callable[[TokenRows], torch.Tensor], rows: TokenRows, tolerance: float
) -> None:
    """ThreestepError unless the model computes tokens by experts that are given. A collective under ZeRO-3.

    read: TokenRows -> float32 [M], in eval mode. rows: on the device, their experts free. tolerance: of rounding.
    """
    seats, name = _seats(replay.model, True), type(replay.model).__name__
    with torch.no_grad(), _following(seats), replay.recorded(replay.model) as last:
        counts = [seat.calls for seat in seats]
        free_M = read(rows)
        calls = {seat.calls - before for seat, before in zip(seats, counts, strict=True)}
        if 1 not in calls or not calls <= {0, 1}:
            raise _not_followed(name, f"layers choose them with {max(calls)} calls of torch.topk instead of one")
        if any(seat.experts == seat.top_k for seat in seats):
            raise _not_followed(name, "every token goes to every expert")
        own_tLK = last()
        other_tLK = own_tLK.clone()
        other_tLK[..., -1] = _first_free(own_tLK)
        same_M, other_M = (read(with_experts(rows, given_tLK)) for given_tLK in (own_tLK, other_tLK))
    if not rms((same_M - free_M).double()) <= tolerance:
        raise _not_followed(name, "replaying its own choice changes its log-probabilities")
    if torch.equal(other_M, free_M):
        raise _not_followed(name, "a different choice does not change its log-probabilities")


def _not_followed(name: str, reason: str) -> ThreestepError:
    return ThreestepError(
        f"--replay_routers: {name} does not use the experts it is given: {reason}; leave --replay_routers out, or use "
        "another model"
    )


@contextlib.contextmanager
def _following(seats: Sequence[_Seat]) -> Iterator[None]:
    before = [seat.follows for seat in seats]
    for seat in seats:
        seat.follows = True
    try:
        yield
    finally:
        for seat, follows in zip(seats, before, strict=True):
            seat.follows = follows


def _first_free(own_tLK: torch.Tensor) -> torch.Tensor:
    """int16 [t, L], the least expert that is not among a token's."""
    candidates = torch.arange(own_tLK.shape[-1] + 1, device=own_tLK.device)
    is_taken_tLC = (own_tLK.unsqueeze(-1) == candidates).any(dim=-2)
    return (~is_taken_tLC).int().argmax(dim=-1).to(torch.int16)


def with_experts(rows: TokenRows, experts_tLK: torch.Tensor) -> TokenRows:
    """Return the rows with the experts of their slots given."""
    count, width = rows.input_ids_NT.shape
    experts_NTLK = experts_tLK[: count * width].view(count, width, *experts_tLK.shape[1:])
    return replace(rows, slots=replace(rows.slots, experts_NTLK=experts_NTLK))
