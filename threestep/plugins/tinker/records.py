"""Requests of training clients as the rest of the room reads them, whatever form they came in.

T tokens of a datum, K targets of a position (1 unless a datum has several).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    import torch

ATTENTION, MLP, HEAD = "attention", "mlp", "head"
PARTS = (ATTENTION, MLP, HEAD)


class WrongRequest(ThreestepError):
    """A client's mistake that its future tells."""


class UnknownRequest(WrongRequest):
    """There is no such client or request, or its answer is gone."""


@dataclass(frozen=True)
class LoraSpec:
    """Adapters of a client. seed: of the first weights. parts: of the model that have some, a subset of PARTS."""

    rank: int
    seed: int
    parts: tuple[str, ...] = PARTS

    @property
    def shape(self) -> tuple[object, ...]:
        """Clients with equal shapes share micro-batches."""
        return self.rank, self.parts


@dataclass(frozen=True)
class GivenMedia:
    """Media among the tokens of an input. spans: where each stands, whose key is its place in `sent`. sent: each as the
    client sent it."""

    spans: tuple[Any, ...] = ()
    sent: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class TrainingDatum:
    """ids_T: int64, the input. targets_TK: int64, the tokens that position t is to predict, shifted by the client.
    inputs: of the loss, by name, float32 [T, K]. is_flat: the client gave targets [T], and gets log-probabilities so.
    """

    ids_T: torch.Tensor
    targets_TK: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    is_flat: bool = True
    media: GivenMedia = GivenMedia()

    def __len__(self) -> int:
        return int(self.ids_T.numel())


@dataclass(frozen=True)
class ForwardOrder:
    """A forward, and its backward if `has_backward`. config: numbers of the loss that are not its default."""

    data: tuple[TrainingDatum, ...]
    loss: str
    config: Mapping[str, float] = field(default_factory=dict)
    has_backward: bool = True


@dataclass(frozen=True)
class ForwardResult:
    """loss: the sum over all targets. logprobs: of each datum, float [T] or [T, K]."""

    loss: float
    logprobs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AdamOrder:
    """Settings of one optimizer step, with the client's defaults. grad_clip_norm: 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SaveOrder:
    """name: of the checkpoint; None: of weights for one sampling session, `session_number`. for_sampling: weights
    alone."""

    name: str | None
    overwrite: bool = False
    for_sampling: bool = False
    session_number: int | None = None


@dataclass(frozen=True)
class LoadOrder:
    """path: tinker://... with_optimizer: its moments too."""

    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class SamplePrompt:
    """Tokens, with media among them."""

    ids: tuple[int, ...]
    media: GivenMedia = GivenMedia()


@dataclass(frozen=True)
class SampleOrder:
    """most_tokens: None, as many as the model's positions leave. top_sample: further tokens with their
    log-probabilities."""

    prompt: SamplePrompt
    samples: int = 1
    most_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: StopRule = field(default_factory=lambda: StopRule())
    read: PromptReading = field(default_factory=lambda: PromptReading())
    top_sample: int = 0


@dataclass(frozen=True)
class StopRule:
    """ids: tokens, each of which ends a sequence; None: the model's own. texts: that end one."""

    ids: tuple[int, ...] | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromptReading:
    """has_logprobs: of the prompt's tokens. last: of so many alone; None: of all. top: likely tokens of each."""

    has_logprobs: bool = False
    last: int | None = None
    top: int = 0


class SampledSequence(NamedTuple):
    """stop: it ended by a stop token or text. top: of each token, likely ones with their log-probabilities."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop: bool
    top: Sequence[Sequence[tuple[int, float]]]


class SampledPrompt(NamedTuple):
    """sequences: drawn. prompt_logprobs: NaN where there is none; None where nobody asked. prompt_top: see `top`."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float] | None
    prompt_top: Sequence[Sequence[tuple[int, float]]] | None


Order = ForwardOrder | AdamOrder | SaveOrder | LoadOrder
