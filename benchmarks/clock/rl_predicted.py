"""The clock's estimate of a published step of RL: drawing, scores, updates, weights on their way to the rollout."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from benchmarks.clock.predicted import model_of, split_work
from threestep.plugins.plan.clock.devices import DEVICES, DEVICES_OF_A_NODE
from threestep.plugins.plan.clock.rollout import DecodePlan, decode_seconds, sum_seconds
from threestep.plugins.plan.clock.roofline import work_seconds
from threestep.plugins.plan.clock.traffic import exposed_gather_seconds, gather_seconds
from threestep.plugins.plan.clock.training_step import Parts, StepPlan, step_parts
from threestep.plugins.plan.clock.work import TrainingWork, Work
from threestep.plugins.plan.dry_run.activations import cache_bytes
from threestep.plugins.plan.dry_run.operators import training_work

if TYPE_CHECKING:
    from benchmarks.clock.rl_rows import RolloutRow

_PACKED = 4096  # tokens of a row
_CACHED = 0.6  # of a GPU's memory for weights and cache of a rollout: NeMo RL's default
_MOST_WEIGHTS = 0.4  # of a GPU's memory, where a source does not say how many share a copy
_WITH_STATES = 16  # bytes of a trained number, states in float32
_INTERVALS = 32  # of a drawing, in each of which as many responses are taken to go on
_SMALL = "opt-350m"  # critic and reward model


def rollout_parts_of(row: RolloutRow, running_share: float) -> Parts:
    """Seconds of one step of RL by parts. Training, then drawing, on all GPUs in turns."""
    parts = _drawing(row, running_share)
    forwards = 2  # the actor's and the reference's
    parts["scores"] = forwards * _scores(row, row.model, running_share)
    parts |= {f"actor: {name}": spent for name, spent in _updates(row, row.model, running_share).items()}
    if row.is_ppo:
        parts["scores"] += 2 * _scores(row, _SMALL, running_share)
        parts["critic"] = sum(_updates(row, _SMALL, running_share).values())
    return parts


def drawing_gpus(row: RolloutRow) -> int:
    """GPUs that share a copy of the model to draw."""
    if row.drawing:
        return row.drawing
    most = _MOST_WEIGHTS * 1e9 * DEVICES[row.device].memory_gb
    return min(DEVICES_OF_A_NODE, 2 ** max(0, math.ceil(math.log2(2 * _weights(row.model) / most))))


def going_on(mean: float, longest: float, at: float) -> float:
    """The share of responses that are longer than `at`: lengths fall off exponentially up to the longest, so that their
    mean is `mean`."""
    if mean >= 0.999 * longest:
        return 1.0
    low, high = 1e-3 * longest, 1e3 * longest
    for _ in range(60):
        middle = math.sqrt(low * high)
        below = middle * -math.expm1(-longest / middle) < mean
        low, high = (middle, high) if below else (low, middle)
    return math.exp(-at / low)


def _drawing(row: RolloutRow, running_share: float) -> Parts:
    device, model, together = DEVICES[row.device], model_of(row.model, False), drawing_gpus(row)
    prompt, mean, longest = row.lengths
    config, weights = model.config, _weights(row.model)
    drawn = row.sequences * together / row.gpus  # of one copy
    a_token = cache_bytes(config, 1, 1, 2)
    room = max(0.1 * device.memory_gb, _CACHED * device.memory_gb - 2e-9 * weights / together) * 1e9 * together
    waves = math.ceil(drawn * mean * a_token / room)
    answers, interval, decoded, summed = mean - prompt, (longest - prompt) / _INTERVALS, 0.0, 0.0
    for number in range(_INTERVALS):
        begun = interval * number
        alive = max(1.0, drawn / waves * going_on(answers, longest - prompt, begun + interval / 2))
        read = _read_weights(row, alive) / together
        plan = DecodePlan(read, 2, a_token / together, int(alive), prompt + int(begun), int(interval), 0)
        # Arithmetic is of the weights that each token uses; where fewer are used than read, reading is longer anyway.
        decoded += waves * decode_seconds(plan, device)
        if together > 1:
            none = plan._replace(prompt=0)
            summed += waves * sum_seconds(none, config.num_hidden_layers, config.hidden_size, together, device=device)
    parts = {"prefill": _scores(row, row.model, running_share) * prompt / mean, "decode": decoded}
    if summed:
        parts["all-reduce between ranks that generate together"] = summed
    return {**parts, "sending weights to the rollout": gather_seconds(2 * weights, row.gpus, device)}


def _read_weights(row: RolloutRow, sequences: float) -> float:
    """Weights that a step of decoding reads: of a mixture, the experts that some sequence is sent to."""
    config = model_of(row.model, False).config
    experts = getattr(config, "num_experts", 0)
    if not experts:
        return _weights(row.model)
    of_experts = experts * 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    reached = 1 - (1 - config.num_experts_per_tok / experts) ** sequences
    return _weights(row.model) - (1 - reached) * of_experts


def _scores(row: RolloutRow, name: str, running_share: float) -> float:
    """Seconds of a forward over all sequences."""
    work, device, plan = _work(row, name), DEVICES[row.device], _plan(row, name)
    body, head = (work_seconds(part, device).device for part in (work.forward, work.head))
    computed = (body + head / 3) / running_share
    if plan.zero_stage == 3:
        computed += exposed_gather_seconds(2 * plan.weights, plan.ranks, device, layers=plan.layers, computed=computed)
    return row.updates * _micro_steps(row) * computed * _bubble(row)


def _updates(row: RolloutRow, name: str, running_share: float) -> Parts:
    work, device, plan = _work(row, name), DEVICES[row.device], _plan(row, name)
    parts = step_parts(work, plan, device, running_share)
    tensor = row.split[0]
    if tensor > 1:  # two sums of a layer's outputs in each forward, backward and recomputation
        config = model_of(name, False).config
        sums = config.num_hidden_layers / row.split[1] * 2 * (2 + plan.recomputed)
        passed = gather_seconds(2.0 * _PACKED * config.hidden_size, tensor, device)
        parts["tensor parallel"] = plan.micro_steps * sums * 2 * passed
    return {part: row.updates * _bubble(row) * spent for part, spent in parts.items()}


def _plan(row: RolloutRow, name: str) -> StepPlan:
    """The settings of a model's updates: NeMo RL shards the optimizer's states, DeepSpeed-Chat everything."""
    tensor, pipeline, experts = row.split
    weights = _weights(name)
    if row.is_ppo:
        fits = _WITH_STATES * weights / row.gpus < 0.6e9 * DEVICES[row.device].memory_gb
        steps, offloads = _micro_steps(row), not fits
        return StepPlan(
            weights, weights, _layers(name), row.gpus, steps, zero_stage=3, offloads=offloads, recomputed=1.0
        )
    held = weights / tensor / pipeline / experts
    ranks = max(1, row.gpus // (tensor * pipeline))
    recomputed = 1.0 if name == "llama3-8b" else 0.0
    layers = max(1, _layers(name) // pipeline)
    return StepPlan(held, held, layers, ranks, _micro_steps(row), zero_stage=1, recomputed=recomputed)


def _micro_steps(row: RolloutRow) -> int:
    """Packed rows of one update on one rank."""
    tensor, pipeline, _ = row.split
    tokens = row.sequences * row.lengths[1] / row.updates
    return max(1, math.ceil(tokens / _PACKED / (row.gpus // (tensor * pipeline))))


def _bubble(row: RolloutRow) -> float:
    """Seconds of a pipeline over those of its computation (Narayanan et al. 2021, section 2.2)."""
    return 1 + (row.split[1] - 1) / _micro_steps(row)


@cache
def _work(row: RolloutRow, name: str) -> TrainingWork:
    """A packed row's work on one GPU. GPUs that share experts send these their tokens together."""
    tensor, pipeline, experts = row.split
    mean = row.lengths[1]
    rows = max(1, round(_PACKED / mean)) * experts
    counted = training_work(model_of(name, False), rows, mean, rows * mean)
    share = _PACKED / (rows * mean)
    forward, backward, head = (Work().plus(split_work(part, tensor), share) for part in counted)
    return TrainingWork(Work().plus(forward, 1 / pipeline), Work().plus(backward, 1 / pipeline), head)


@cache
def _weights(name: str) -> int:
    return sum(part.numel() for part in model_of(name, False).parameters())


def _layers(name: str) -> int:
    layers: int = model_of(name, False).config.num_hidden_layers
    return layers
