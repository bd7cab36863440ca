"""What a drawn token costs on this CPU, measured by the rollout engine's own loop on small models.

A step of drawing runs each product of a few rows between Python and operators that take the caches; the same products
in a row are up to twice as fast. So drawing is measured as it runs: models of next to no width have its launches and,
with a larger vocabulary, what is done for each logit; wider ones have its products, a narrow one what each of these
takes besides its weights, and long prompts the attention. In seconds of `in_a_model.now`, as the rates beside it.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from threestep.plugins.plan.clock.devices import Device, Points
from threestep.plugins.plan.dry_run.activations import cache_bytes
from threestep.plugins.plan.dry_run.in_a_model import now
from threestep.plugins.plan.dry_run.operators import training_work
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.engine.ranks.devices import backend_of
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.own_forward import own_forward_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

_Shape = tuple[int, int, int]  # width, layers, vocabulary
_Case = tuple[_Shape, int, int]  # of a model: rows, tokens of the prompt
_Drawer = tuple[TransformersRollout, "PreTrainedModel"]

_ROWS = (1, 2, 4, 8, 16)
_WIDTH, _HEAD = 320, 64
_VOCABULARY, _LARGE_VOCABULARY = 512, 4096
_NARROW = 128, 6  # 5 MB in more products than the first of 6 MB
_LAYERS = (1, 3, 6)  # of 6, 15 and 30 MB: a cache that others use too holds the first, and the second at times
_SHORT, _LONG = 4, 24  # tokens of two drawings: their difference has neither prompts nor what is done once
_PROMPT, _LONG_PROMPT = 8, 256
_TRIES = 5


class Steps(NamedTuple):
    """A model's steps behind short prompts: seconds by rows; operators of a step, and products among them; numbers that
    these read."""

    seconds: dict[int, float]
    operators: float
    products: float
    weights: int


class Besides(NamedTuple):
    """Seconds of a step besides its products: of its own, for each number of its logits, and for each operator."""

    token: float
    logit: float
    operator: float

    def seconds(self, steps: Steps, rows: int) -> float:
        """Of a model with the small vocabulary."""
        return self.token + self.logit * rows * _VOCABULARY + self.operator * steps.operators


def with_drawing(device: Device) -> Device:
    """The measured device with what drawing costs here."""
    with backend_of({}, torch.device("cpu")).held():
        return _with_drawing(device)


def _with_drawing(device: Device) -> Device:
    assert device.measured is not None
    shapes = [(8, 1), (8, 5), _NARROW, *((_WIDTH, layers) for layers in _LAYERS)]
    models = {(*shape, _VOCABULARY): _engine(_model(*shape, _VOCABULARY)) for shape in shapes}
    models[8, 1, _LARGE_VOCABULARY] = _engine(_model(8, 1, _LARGE_VOCABULARY))
    middle = _WIDTH, _LAYERS[1], _VOCABULARY
    cached = middle, _ROWS[-1], _LONG_PROMPT
    seconds = _seconds_in_turns(models, [*((shape, rows, _PROMPT) for shape in models for rows in _ROWS), cached])
    one, five, narrow, *wide, many = (
        _steps(shape, {rows: seconds[shape, rows, _PROMPT] for rows in _ROWS}) for shape in models
    )
    besides = _besides(one, five, many)
    costs = device.measured.costs._replace(token=(besides.token, besides.logit), drawn=besides.operator)
    further = max(1e-6, seconds[cached] - seconds[middle, _ROWS[-1], _PROMPT])
    a_token = cache_bytes(models[middle][1].config, 1, 1, 4)
    cache_rate = _ROWS[-1] * a_token * (_LONG_PROMPT - _PROMPT) / further
    products = _product_seconds(narrow, wide[0], besides)
    thin = tuple(_thin_rates(steps, besides, products) for steps in wide)
    found = device.measured._replace(costs=costs, thin=thin, cache_rate=cache_rate)
    return replace(device, measured=found._replace(thin_products=tuple(products.items())))


def _besides(one: Steps, five: Steps, many: Steps) -> Besides:
    """Of models of next to no width: of one layer, of five, and of one with a large vocabulary."""
    logits, operators = _LARGE_VOCABULARY - _VOCABULARY, five.operators - one.operators
    operator = statistics.median((five.seconds[rows] - one.seconds[rows]) / operators for rows in _ROWS)
    logit = max(0.0, statistics.median((many.seconds[rows] - one.seconds[rows]) / (rows * logits) for rows in _ROWS))
    known = Besides(0.0, logit, operator)
    token = statistics.median(one.seconds[rows] - known.seconds(one, rows) for rows in _ROWS)
    return known._replace(token=max(0.0, token))


def _seconds_in_turns(models: Mapping[_Shape, _Drawer], cases: Sequence[_Case]) -> dict[_Case, float]:
    """Median seconds of a step of each case, all of them in turns: what else the machine does meets all alike."""
    tries = [[_step_seconds(*models[shape], rows, prompt) for shape, rows, prompt in cases] for _ in range(_TRIES)]
    return dict(zip(cases, map(statistics.median, zip(*tries, strict=True)), strict=True))


def _product_seconds(narrow: Steps, wide: Steps, besides: Besides) -> dict[float, float]:
    """What a product takes besides its weights, by rows, from two models of about as many weights in more products and
    in fewer: `seconds = weights x + products y` for both."""
    found = {}
    for rows in _ROWS:
        many, few = (each.seconds[rows] - besides.seconds(each, rows) for each in (narrow, wide))
        more = narrow.products * wide.weights - wide.products * narrow.weights
        found[float(rows)] = max(0.0, (many * wide.weights - few * narrow.weights) / more)
    return found


def _thin_rates(wide: Steps, besides: Besides, products: Mapping[float, float]) -> tuple[float, Points]:
    """The weights of a model and FLOP/s by rows. products: seconds of a product by rows, besides its weights."""
    seconds = {
        rows: wide.seconds[rows] - besides.seconds(wide, rows) - wide.products * products[rows] for rows in _ROWS
    }
    return float(wide.weights), tuple((float(rows), 2.0 * wide.weights * rows / seconds[rows]) for rows in _ROWS)


def _steps(shape: _Shape, seconds: dict[int, float]) -> Steps:
    with torch.device("meta"):
        model = _model(*shape)
    looked_up = model.config.vocab_size * model.config.hidden_size
    weights = sum(part.numel() for part in model.parameters()) - looked_up
    work = training_work(model, 1, _PROMPT, 1).forward
    return Steps(seconds, work.launches, 1 + sum(work.matmuls.values()), weights)


def _model(width: int, layers: int, vocabulary: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // _HEAD)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
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
