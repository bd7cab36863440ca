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
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

_Shape = tuple[int, int]  # width, layers
_Case = tuple[_Shape, int, int]  # of a model: rows, tokens of the prompt
_Drawer = tuple[TransformersRollout, "PreTrainedModel"]

_ROWS = (1, 2, 4, 8, 16)
_WIDTH, _HEAD = 320, 64
_LAYERS = (1, 3, 6)  # of 6, 15 and 30 MB: a cache that others use too holds the first, and the second at times
_SHORT, _LONG = 4, 24  # tokens of two drawings: their difference has neither prompts nor what is done once
_PROMPT, _LONG_PROMPT = 8, 256
_TRIES = 5


class Steps(NamedTuple):
    """A model's steps behind short prompts: seconds by rows; operators of a step; numbers that its products read."""

    seconds: dict[int, float]
    operators: float
    weights: int


def with_drawing(device: Device) -> Device:
    """The measured device with what drawing costs here."""
    with float32_products(chosen_products(None, torch.device("cpu"))):
        return _with_drawing(device)


def _with_drawing(device: Device) -> Device:
    assert device.measured is not None
    shapes = [(8, 1), (8, 5), *((_WIDTH, layers) for layers in _LAYERS)]
    models = {shape: _engine(_model(*shape)) for shape in shapes}
    middle = _WIDTH, _LAYERS[1]
    cached = middle, _ROWS[-1], _LONG_PROMPT
    seconds = _seconds_in_turns(models, [*((shape, rows, _PROMPT) for shape in shapes for rows in _ROWS), cached])
    one, five, *wide = (_steps(shape, {rows: seconds[shape, rows, _PROMPT] for rows in _ROWS}) for shape in shapes)
    more = five.operators - one.operators
    drawn = statistics.median((five.seconds[rows] - one.seconds[rows]) / more for rows in _ROWS)
    token = max(0.0, statistics.median(one.seconds[rows] - drawn * one.operators for rows in _ROWS))
    costs = device.measured.costs._replace(token=token, drawn=drawn)
    further = max(1e-6, seconds[cached] - seconds[middle, _ROWS[-1], _PROMPT])
    a_token = cache_bytes(models[middle][1].config, 1, 1, 4)
    cache_rate = _ROWS[-1] * a_token * (_LONG_PROMPT - _PROMPT) / further
    thin = tuple(_thin_rates(steps, token, drawn) for steps in wide)
    return replace(device, measured=device.measured._replace(costs=costs, thin=thin, cache_rate=cache_rate))


def _seconds_in_turns(models: Mapping[_Shape, _Drawer], cases: Sequence[_Case]) -> dict[_Case, float]:
    """Median seconds of a step of each case, all of them in turns: what else the machine does meets all alike."""
    tries = [[_step_seconds(*models[shape], rows, prompt) for shape, rows, prompt in cases] for _ in range(_TRIES)]
    return dict(zip(cases, map(statistics.median, zip(*tries, strict=True)), strict=True))


def _thin_rates(wide: Steps, token: float, drawn: float) -> tuple[float, Points]:
    """The weights of a model and FLOP/s by rows. token, drawn: seconds of a step besides it, and of an operator."""
    besides = token + drawn * wide.operators
    rates = tuple((float(rows), 2.0 * wide.weights * rows / (wide.seconds[rows] - besides)) for rows in _ROWS)
    return float(wide.weights), rates


def _steps(shape: _Shape, seconds: dict[int, float]) -> Steps:
    with torch.device("meta"):
        model = _model(*shape)
    looked_up = model.config.vocab_size * model.config.hidden_size
    weights = sum(part.numel() for part in model.parameters()) - looked_up
    return Steps(seconds, training_work(model, 1, _PROMPT, 1).forward.launches, weights)


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
    """Seconds of a step of `rows` samples of one prompt."""
    ids = torch.full((1, prompt), 2)

    def drawn(tokens: int) -> float:
        sampling = Sampling(tokens, 1.0, 0, 1.0, end_token_id=-1, pad_token_id=0)
        request = RolloutRequest(ids, torch.ones_like(ids).bool(), sampling, range(rows), rows)
        begun = now()
        engine.roll_out(model, request)
        return now() - begun

    drawn(_SHORT)
    return (drawn(_LONG) - drawn(_SHORT)) / (_LONG - _SHORT)
