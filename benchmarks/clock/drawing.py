"""What a drawn token costs on this CPU, measured by the rollout engine's own loop on small models.

A step of drawing runs each product of a few rows between Python and operators that take the caches; the same products
in a row are up to twice as fast. So drawing is measured as it runs: models of next to no width have its launches, wider
ones its products, and long prompts its attention. In seconds of `in_a_model.now`, as the rates beside it.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.utils.clock.devices import Device, Points
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.dry_run.activations import cache_bytes
from training.utils.dry_run.in_a_model import now
from training.utils.dry_run.operators import training_work
from training.utils.engine.ranks.cpu_products import chosen_products, float32_products
from training.utils.generation.engines.hf import TransformersRollout
from training.utils.models.own_forward import own_forward_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = (1, 2, 4, 8, 16)
_WIDTH, _HEAD = 320, 64
_LAYERS = (2, 6)  # of 10 and 30 MB: a cache holds the smaller one's weights
_SHORT, _LONG = 8, 40  # tokens of two drawings: their difference has neither prompts nor what is done once
_PROMPT, _LONG_PROMPT = 8, 256
_TRIES = 5


class Steps(NamedTuple):
    """A model's steps: seconds by rows; operators of a step; numbers that its products read."""

    seconds: dict[int, float]
    operators: float
    weights: int


def with_drawing(device: Device) -> Device:
    """The measured device with what drawing costs here."""
    with float32_products(chosen_products(None, torch.device("cpu"))):
        return _with_drawing(device)


def _with_drawing(device: Device) -> Device:
    assert device.measured is not None
    one, five = _steps(8, 1), _steps(8, 5)
    more = five.operators - one.operators
    drawn = statistics.median((five.seconds[rows] - one.seconds[rows]) / more for rows in _ROWS)
    token = max(0.0, statistics.median(one.seconds[rows] - drawn * one.operators for rows in _ROWS))
    costs = device.measured.costs._replace(token=token, drawn=drawn)
    thin = tuple(_thin_rates(_steps(_WIDTH, layers), token, drawn) for layers in _LAYERS)
    measured = device.measured._replace(costs=costs, thin=thin, cache_rate=_cache_rate())
    return replace(device, measured=measured)


def _thin_rates(wide: Steps, token: float, drawn: float) -> tuple[float, Points]:
    """The weights of a model and FLOP/s by rows. token, drawn: seconds of a step besides it, and of an operator."""
    besides = token + drawn * wide.operators
    rates = tuple((float(rows), 2.0 * wide.weights * rows / (wide.seconds[rows] - besides)) for rows in _ROWS)
    return float(wide.weights), rates


def _steps(width: int, layers: int) -> Steps:
    engine, model = _engine(_model(width, layers))
    seconds = {rows: _step_seconds(engine, model, rows, _PROMPT) for rows in _ROWS}
    looked_up = model.config.vocab_size * width
    weights = sum(part.numel() for part in model.parameters()) - looked_up
    with torch.device("meta"):
        operators = training_work(_model(width, layers), 1, _PROMPT, 1).forward.launches
    return Steps(seconds, operators, weights)


def _cache_rate() -> float:
    """Bytes a second of keys and values that steps read: 16 rows behind long prompts and behind short ones."""
    engine, model = _engine(_model(_WIDTH, 2))
    short, long = (_step_seconds(engine, model, _ROWS[-1], prompt) for prompt in (_PROMPT, _LONG_PROMPT))
    a_token = cache_bytes(model.config, 1, 1, 4)
    return _ROWS[-1] * a_token * (_LONG_PROMPT - _PROMPT) / max(1e-6, long - short)


def _model(width: int, layers: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // _HEAD)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=512,
        max_position_embeddings=_LONG_PROMPT + _LONG,
    )
    with torch.random.fork_rng():
        return LlamaForCausalLM(config).eval()


def _engine(model: PreTrainedModel) -> tuple[TransformersRollout, PreTrainedModel]:
    engine, own = TransformersRollout(), own_forward_of(model)
    assert own is not None, "its weights are whole"
    engine.check(nullcontext(model), own)
    return engine, model


def _step_seconds(engine: TransformersRollout, model: PreTrainedModel, rows: int, prompt: int) -> float:
    """Median seconds of a step of `rows` samples of one prompt."""
    ids = torch.full((1, prompt), 2)

    def drawn(tokens: int) -> float:
        sampling = Sampling(tokens, 1.0, 0, 1.0, end_token_id=-1, pad_token_id=0)
        request = RolloutRequest(ids, torch.ones_like(ids).bool(), sampling, range(rows), rows)
        begun = now()
        engine.roll_out(model, request)
        return now() - begun

    drawn(_SHORT)
    return statistics.median((drawn(_LONG) - drawn(_SHORT)) / (_LONG - _SHORT) for _ in range(_TRIES))
