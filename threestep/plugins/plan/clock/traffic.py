"""Seconds of collectives: a latency for every hop and the bytes of the slowest link (alpha-beta), and ZeRO's traffic.

R ranks stand in nodes of at most `DEVICES_OF_A_NODE`. Of a gather of P bytes a rank receives P (R - 1) / R within its
node, and a node of g ranks, one network card each, P (k - 1) / k of its k nodes through g cards. A reduction that
scatters is the same backward, and one of all ranks is both (docs/lab_book/2026-q4-clock.md has the sources).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from threestep.plugins.plan.clock.devices import DEVICES_OF_A_NODE

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.devices import Device

# Measured all-reduces [E]. 8 H200: 40 us are left of the smallest ones, over 14 hops. Four nodes of B200: 370 us, over
# 62. Rings reach 0.80 of NVLink (361 of 450 GB/s), and four nodes 0.74 of their network (382 GB/s at 16 GB, whose card
# carries 1.5 / 8 of the bytes).
HOP_WITHIN, HOP_BETWEEN = 3e-6, 6e-6
SHARE_WITHIN, SHARE_BETWEEN = 0.80, 0.74


class Traffic(NamedTuple):
    """Bytes of one optimizer step, of whole models.

    gathered_forward, gathered_backward, reduced: in every micro-step; reduced_once, at_the_end: after the last one's
    backward, and gathered after the optimizer
    """

    gathered_forward: float = 0.0
    gathered_backward: float = 0.0
    reduced: float = 0.0
    reduced_once: float = 0.0
    at_the_end: float = 0.0


def gather_seconds(total_bytes: float, ranks: int, device: Device, messages: int = 1) -> float:
    """Seconds in which every rank receives all of `total_bytes`, or the reverse with sums."""
    if ranks == 1 or not total_bytes:
        return 0.0
    of_a_node = min(ranks, DEVICES_OF_A_NODE)
    nodes = -(-ranks // of_a_node)
    hop = HOP_WITHIN if nodes == 1 else HOP_BETWEEN
    within = total_bytes * (ranks - 1) / ranks / (SHARE_WITHIN * device.links.within * 1e9)
    between = total_bytes * (nodes - 1) / nodes / of_a_node / (SHARE_BETWEEN * device.links.between * 1e9)
    return messages * (ranks - 1) * hop + max(within, between)


def exposed_gather_seconds(total_bytes: float, ranks: int, device: Device, *, layers: int, computed: float) -> float:
    """Seconds that a forward of `computed` seconds waits for its gathers, layer by layer: nothing is computed during
    the first, and the others hide behind computation."""
    gathered = gather_seconds(total_bytes, ranks, device, layers)
    first = gathered / layers
    return first + max(0.0, gathered - first - computed)


def zero_traffic(weight_bytes: float, gradient_bytes: float, stage: int) -> Traffic:
    """Bytes that DeepSpeed 0.19 moves. Gradients are reduced in every micro-step from stage 2 on, once in a step below
    (stage_1_and_2.py: reduce_ready_partitions_and_remove_grads). Stage 3 gathers weights for the forward and for the
    backward, which also computes layers again by them.

    weight_bytes, gradient_bytes: of what is gathered and what is trained
    """
    if stage == 3:
        return Traffic(weight_bytes, weight_bytes, gradient_bytes)
    if stage == 2:
        return Traffic(reduced=gradient_bytes, at_the_end=gradient_bytes)
    if stage == 1:
        return Traffic(reduced_once=gradient_bytes, at_the_end=gradient_bytes)
    return Traffic(reduced_once=2 * gradient_bytes)
