"""Rollout engines that are wrong on purpose: with weights in 8 bits, a temperature that is off, or old weights.

Training rollouts alone are wrong; evaluations draw from the model as it is. The recorded log-probabilities are honest:
those of the policy that drew, as an inference engine with such weights would give them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Decode, RolloutRequest
from training.utils.generation.decoding.hf import TransformersRollout

_LARGEST = {"int8": 127.0, "fp8": 448.0}  # the largest number of 8 bits; fp8 is float8_e4m3fn


@dataclass(frozen=True)
class Wrong:
    """bits: int8, fp8, or None for the weights as they are. temperature: a factor of the sampling's. age: the rollouts
    that the weights are old."""

    words: str
    bits: str | None = None
    temperature: float = 1.0
    age: int = 0


WRONGS = {
    "right": Wrong("as it is"),
    "int8": Wrong("weights in int8, a scale for each row", bits="int8"),
    "fp8": Wrong("weights in fp8 (e4m3), a scale for each row", bits="fp8"),
    "hot": Wrong("temperature 1.1", temperature=1.1),
    "cold": Wrong("temperature 0.9", temperature=0.9),
    **{f"old{age}": Wrong(f"weights old by {age}", age=age) for age in (1, 2, 4, 8)},
}


class WrongRollout(TransformersRollout):
    """Requests for `samples` responses a prompt are training's and are drawn wrongly; others, of evaluations, rightly.
    `wrong_engine` makes its subclasses."""

    wrong: ClassVar[Wrong]
    samples: ClassVar[int]

    def __init__(self, decode: Decode | None = None) -> None:
        super().__init__(decode)
        self._past: deque[dict[str, torch.Tensor]] = deque(maxlen=self.wrong.age + 1)

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        if request.samples_per_prompt != self.samples:
            return super().roll_out(model, request)
        self._past.append(weights_of(model))
        sampling = replace(request.sampling, temperature=request.sampling.temperature * self.wrong.temperature)
        weights = {name: rounded(weight, self.wrong.bits) for name, weight in self._past[0].items()}
        with having(model, weights):
            return super().roll_out(model, replace(request, sampling=sampling))


def wrong_engine(wrong: Wrong, samples: int) -> type[WrongRollout]:
    """Return an engine that draws wrongly where a rollout has `samples` responses a prompt."""
    return type("WrongRolloutOfThisRun", (WrongRollout,), {"wrong": wrong, "samples": samples})


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a copy of the parameters by name; one that two modules share is there once."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@contextlib.contextmanager
def having(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model has other weights; afterwards its own, to the bit."""
    own = weights_of(model)
    try:
        _put(model, weights)
        yield
    finally:
        _put(model, own)


@torch.no_grad()
def _put(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])


def rounded(weight: torch.Tensor, bits: str | None) -> torch.Tensor:
    """Return a matrix as 8 bits hold it, each row scaled so that its largest number is the largest of the format. What
    is no matrix (norms) keeps its precision, as in inference engines."""
    if bits is None or weight.dim() < 2:
        return weight
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / _LARGEST[bits]
    scaled = weight / scale
    return (scaled.round() if bits == "int8" else scaled.to(torch.float8_e4m3fn).to(weight.dtype)) * scale
