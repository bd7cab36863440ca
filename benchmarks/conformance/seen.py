"""What is seen of a trainer at work: the rows its model got, gradients, weights and losses of each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

IGNORED = -100


@dataclass(frozen=True)
class SftCase:
    """What a trainer is to do. rows: conversations under `messages` or texts under `text`. extra: settings of the
    trainer under its names, beside those that the adapter gives."""

    rows: list[dict[str, Any]]
    micro_batch: int = 8
    accumulation: int = 1
    steps: int = 1
    max_length: int = 256
    packing: bool = False
    padding_side: str = "right"
    pad_to: int | None = None
    ranks: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PairCase:
    """rows: pairs in TRL's form. loss: sigmoid, ipo or hinge. The reference is the model of another seed, or, where
    a trainer has no setting for that, the model itself."""

    rows: list[dict[str, Any]]
    micro_batch: int = 8
    accumulation: int = 1
    steps: int = 1
    loss: str = "sigmoid"
    beta: float = 0.1
    smoothing: float = 0.0


@dataclass(frozen=True)
class MarkedCase:
    """rows: single responses in TRL's form, each with its `label`. rate: of plain SGD. The last step counts; the
    reference is the model of another seed, or, where a trainer has no setting for that, that before the first step."""

    rows: list[dict[str, Any]]
    micro_batch: int = 8
    accumulation: int = 1
    beta: float = 0.1
    rate: float = 1.0


@dataclass(frozen=True)
class PolicyCase:
    """Fixed responses for one optimizer step. reduction: as TRL calls them. micro_batch x accumulation is 8."""

    reduction: str
    micro_batch: int = 8
    accumulation: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class MicroBatch:
    """ids_BT, mask_BT and positions_BT as the model got them, labels_BT as the loss did; trained_BT: where the last
    hidden state got a gradient, so that the token after it carries loss. None: not seen."""

    ids: torch.Tensor
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    trained: torch.Tensor | None = None


@dataclass(frozen=True)
class Document:
    """ids_T, and counts_T: whether the token itself carries loss."""

    ids: tuple[int, ...]
    counts: tuple[bool, ...]


@dataclass(frozen=True)
class Response:
    """ids_T of prompt and response; old_R and ref_R: log-probabilities of the response."""

    ids: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    advantage: float


@dataclass
class Seen:
    """Of each optimizer step: the micro-batches of this rank, the gradient that the optimizer was given and the loss as
    logged; weights: before each step, and after the last. Vectors hold all weights in the order of their names. inputs:
    what the loss was given, if it is seen; pairs: (chosen, rejected) of each step. responses: of the one step of a
    policy, where a trainer has drawn its own. marked: of one step, each response with its mark; mismatched: prompts
    with other rows' responses, by which that step's trainer found KTO's point."""

    batches: list[list[MicroBatch]] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    inputs: list[list[dict[str, Any]]] = field(default_factory=list)
    pairs: list[list[tuple[Document, Document]]] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    marked: list[tuple[Document, bool]] = field(default_factory=list)
    mismatched: list[Document] = field(default_factory=list)
    reference_seed: int = 1


def flat(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All values in one vector, in the order of the names."""
    return torch.cat([named[name].detach().double().flatten() for name in sorted(named)])


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """Distance over the size of the other."""
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def documents(batches: Sequence[MicroBatch], by: str = "labels") -> list[Document]:
    """The documents of micro-batches without their padding. by: "labels", or "trained" for those that a gradient
    shows. Documents of one row are told apart by positions that begin at 0 anew, or by a mask that numbers them."""
    found = []
    for batch in batches:
        counts = _counts(batch, by)
        for row in range(len(batch.ids)):
            for places in _spans(batch, row):
                ids = tuple(batch.ids[row, places].tolist())
                carries = counts[row, places].tolist()
                found.append(Document(ids, (False, *carries[1:])))
    return found


def _counts(batch: MicroBatch, by: str) -> torch.Tensor:
    if by == "labels":
        assert batch.labels is not None, "no labels were seen"
        return batch.labels != IGNORED
    assert batch.trained is not None, "no gradient was seen"
    return torch.cat([torch.zeros_like(batch.trained[:, :1]), batch.trained[:, :-1]], 1)


def _spans(batch: MicroBatch, row: int) -> list[torch.Tensor]:
    width = batch.ids.shape[1]
    mask = torch.ones(width, dtype=torch.long) if batch.mask is None else batch.mask[row].long()
    if mask.max() > 1:  # numbered documents
        return [(mask == number).nonzero()[:, 0] for number in range(1, int(mask.max()) + 1)]
    places = mask.nonzero()[:, 0]
    if batch.positions is None or not len(places):
        return [places]
    positions = batch.positions[row % len(batch.positions)]
    starts = [i for i, place in enumerate(places.tolist()) if positions[place] == 0 or i == 0]
    return [places[start:end] for start, end in zip(starts, [*starts[1:], len(places)], strict=True)]


def plain_gradient(
    model: Any, weights: torch.Tensor, rows: Sequence[Document], smoothing: float = 0.0
) -> tuple[float, torch.Tensor]:
    """The token mean over all rows and its gradient, in float64, each row by itself: the published objective.

    smoothing: of labels, eps of Szegedy et al. 2016, section 7: (1 - eps) of the target and eps of a uniform one.
    """
    model = loaded(model, weights)
    total = sum(sum(row.counts) for row in rows)
    summed = 0.0
    for row in rows:
        if not any(row.counts):
            continue
        ids = torch.tensor([row.ids])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        picked = -logprobs.gather(1, ids[0, 1:, None])[:, 0]
        losses = (1 - smoothing) * picked - smoothing * logprobs.mean(-1)
        loss = losses[torch.tensor(row.counts[1:])].sum() / total
        loss.backward()
        summed += float(loss.detach())
    return summed, gradient_of(model)


def loaded(model: Any, weights: torch.Tensor) -> Any:
    """The model in float64 with the weights of a vector, without gradients."""
    named = dict(model.named_parameters())
    model = model.double().eval()
    model.zero_grad()
    place = 0
    for name in sorted(named):
        size = named[name].numel()
        named[name].data.copy_(weights[place : place + size].view_as(named[name]))
        place += size
    return model


def gradient_of(model: Any) -> torch.Tensor:
    """All gradients in one vector."""
    return flat({name: weight.grad for name, weight in model.named_parameters()})


def logprobs_of(model: Any, row: Document) -> torch.Tensor:
    """Log-probabilities of the tokens that count, of one row by itself."""
    ids = torch.tensor([row.ids])
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[torch.tensor(row.counts[1:])]
