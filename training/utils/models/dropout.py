"""Dropout rates of a loaded model, found by the types of its modules and the names of their attributes and settings.

A name means a rate if it matches `_RATE`, such as attention_dropout, resid_pdrop, drop_path_rate, layerdrop,
router_jitter_noise or attention_probs_dropout_prob; and its value must be one. `check_no_dropout` proves by
forwards that nothing was missed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError
from training.utils.models.own_forward import current_difference, own_forward_of
from training.utils.models.weights import adapters_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_RATE = re.compile(
    r"(dropout|pdrop|(^|_)drop|layer_?drop|drop_?path|stochastic_depth|jitter)(_(p|probs?|rate|ratio|noise|eps))?$"
)
_COUNT = re.compile(r"^(n|num)_")
# Noise that is not dropout of activations, and dropout of heads that a causal model lacks: switched off, never set.
_OTHER_NOISE = re.compile(r"layer_?drop|drop_?path|stochastic_?depth|jitter|classifier|summary", re.IGNORECASE)
_OF_CLASS = re.compile(r"dropout|drop_?path|stochastic_?depth", re.IGNORECASE)
_RATES_OF_CLASS = ("p", "drop_prob", "prob", "rate", "drop_rate")


class SwitchedOff(NamedTuple):
    """An attribute of a module or configuration that is noise by its name, and its rate before it became 0."""

    owner: Any
    name: str
    rate: float


def set_dropout(model: PreTrainedModel, rate: float) -> list[SwitchedOff]:
    """Set every dropout rate, in the configuration and in the modules.

    rate: 0 also switches off layer drop, stochastic depth and the noise of routers, which are returned; they stay as
        they are with a rate above 0.
    """
    configs: dict[int, Any] = {}
    others: list[SwitchedOff] = []
    adapters = adapters_of(model)  # which have another setting
    for name, module in model.named_modules():
        if not adapters.holds(name):
            others += _set_rates(module, rate, _rate_names(module))
            for config in _with_nested(getattr(module, "config", None)):
                configs[id(config)] = config
    for config in configs.values():
        others += _set_rates(config, rate, _named_rates(vars(config)))
    return others


def _set_rates(owner: nn.Module | Any, rate: float, names: list[str]) -> list[SwitchedOff]:
    others = []
    for name in names:
        is_other = _OTHER_NOISE.search(name) or _OTHER_NOISE.search(type(owner).__name__)
        if is_other and rate == 0 and getattr(owner, name) != 0:
            others.append(SwitchedOff(owner, name, getattr(owner, name)))
        if rate == 0 or not is_other:
            setattr(owner, name, rate)
    return others


def _rate_names(module: nn.Module) -> list[str]:
    from torch.nn.modules.dropout import _DropoutNd

    names = _named_rates(vars(module))
    if isinstance(module, _DropoutNd) or _OF_CLASS.search(type(module).__name__):
        names += [name for name in _RATES_OF_CLASS if name not in names and _is_rate(getattr(module, name, None))]
    return names


def _named_rates(values: dict[str, Any]) -> list[str]:
    rates = [name for name, value in values.items() if _is_rate(value)]
    return [name for name in rates if _RATE.search(name) and not _COUNT.search(name)]


def _is_rate(value: Any) -> bool:
    """True for a probability: not a flag, not a count."""
    return isinstance(value, float) and 0 <= value <= 1


def _with_nested(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _with_nested(value)


def switch_dropout(model: PreTrainedModel, rate: float) -> None:
    """Set the rates of dropout and noise, but for those that eval mode uses too, such as PhiMoE's jitter: they are no
    noise."""
    own, others = own_forward_of(model), set_dropout(model, rate)
    if own is None or not others:
        return
    _set_all(others)
    before = current_difference(model, own)
    for name in sorted({other.name for other in others}):
        named = [other for other in others if other.name == name]
        _set_all([other._replace(rate=0.0) for other in named])
        # The same operations on the same numbers: on a CPU to the bit.
        if not math.isclose(current_difference(model, own), before, rel_tol=1e-3):
            _set_all(named)
            own.notes.append(f"{name} is unchanged: without it, the outputs change in eval mode too")


def _set_all(rates: list[SwitchedOff]) -> None:
    for one in rates:
        setattr(one.owner, one.name, one.rate)


def check_no_dropout(
    model: PreTrainedModel, where: str = " with dropout 0", instead: str = "remove the dropout flag"
) -> None:
    """ThreestepError if the model computes something else in train mode than its own forward. Call it before the
    weights change.

    where, instead: for the sentence: the purpose of the model, and the remedy
    """
    own = own_forward_of(model)
    if own is None:
        return
    difference = current_difference(model, own, training=True)
    if not difference <= own.tolerance:
        raise ThreestepError(
            f"{type(model).__name__} computes different outputs in train mode{where}: its log-probabilities or "
            f"scores differ by {difference:.2g} (rounding explains at most {own.tolerance:.2g}); {instead}"
        )
    # In half precision rounding explains much, and a CPU rounds the same numbers alike.
    if model.device.type == "cpu" and current_difference(model, own, training=True) != difference:
        raise ThreestepError(f"{type(model).__name__} is random in train mode{where}; {instead}")
