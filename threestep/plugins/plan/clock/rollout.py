"""Seconds of drawing responses: the prompts' forward, then token by token at the pace of the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from threestep.plugins.plan.clock.devices import USUAL_SHARE
from threestep.plugins.plan.clock.roofline import HOST_SECONDS_AN_OPERATOR, matmul_rates, memory_rate, usual_share
from threestep.plugins.plan.clock.traffic import gather_seconds

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.devices import Device


class DecodePlan(NamedTuple):
    """The decoding of one rank. weights: numbers. cache_bytes: of one token of one sequence. prompt, answer: tokens.
    launches: operators of a step, each launched by the host; 0 if a graph replays them. products: matmuls among them.
    vocabulary: of a row's logits."""

    weights: float
    element_bytes: int
    cache_bytes: float
    sequences: int
    prompt: int
    answer: int
    launches: float
    products: float = 0
    vocabulary: int = 0


def sum_seconds(plan: DecodePlan, layers: int, width: int, ranks: int, *, device: Device) -> float:
    """Seconds in which `ranks` that draw together add up their parts of each layer's two outputs (Shoeybi et al. 2019,
    "Megatron-LM", section 3), of prompts and of every token drawn. plan: of one of them. width: of the states."""
    a_token = plan.sequences * width * plan.element_bytes
    once = gather_seconds(plan.prompt * a_token, ranks, device) + plan.answer * gather_seconds(a_token, ranks, device)
    return 2 * layers * 2 * once  # a reduction and a gather each


def decode_seconds(plan: DecodePlan, device: Device, dtype: str = "bf16") -> float:
    """Seconds of all steps. Each reads the weights and every sequence's cache (Pope et al. 2022, section 2), or
    computes 2 FLOPs a weight and sequence, or waits for the host, whichever is longest. Sequences end late."""
    cached = plan.sequences * plan.cache_bytes * (plan.prompt + plan.answer / 2)
    read = (plan.weights * plan.element_bytes + cached) / memory_rate(device)
    rates = matmul_rates(device, dtype)
    computed = 2 * plan.weights * plan.sequences / (1e12 * (rates.reached or USUAL_SHARE * rates.peak))
    launched, share = plan.launches * HOST_SECONDS_AN_OPERATOR, usual_share(device)
    if device.measured is not None:
        launched = plan.launches * (device.measured.costs.drawn or device.measured.launch_seconds(0.0))
        held = plan.weights + cached / plan.element_bytes  # both come around once a step, and share what caches hold
        computed = 2 * plan.weights * plan.sequences / device.measured.thin_rate(held, plan.sequences)
        cached_too = cached / device.measured.cache_rate  # the weights' way through memory is in the products' rate
        computed += plan.products * device.measured.thin_product_seconds(plan.sequences)
        token, logit = device.measured.costs.token
        drawn = token + logit * plan.sequences * plan.vocabulary
        return plan.answer * (computed + cached_too + launched + drawn)
    return plan.answer * max(read / share, computed / share, launched)
