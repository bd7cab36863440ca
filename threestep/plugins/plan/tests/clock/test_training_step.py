"""Parts of a step: what hides behind computation, what recomputation, offload and the host add."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.clock.roofline import RUNNING_SHARE
from threestep.plugins.plan.clock.training_step import StepPlan, step_parts
from threestep.plugins.plan.clock.work import Matmul, TrainingWork, Work
from threestep.plugins.plan.tests.flat_cpu import flat, host_costs

H100 = DEVICES["h100"]
FORWARD = Work(Counter({Matmul(1, 16384, 8192, 8192): 10}), launches=10)
WORK = TrainingWork(FORWARD, FORWARD.plus(FORWARD), Work())
PLAN = StepPlan(weights=1e9, trained=1e9, layers=10, ranks=1, micro_steps=1)


def test_micro_steps_repeat_and_the_optimizer_does_not():
    once, thrice = (step_parts(WORK, replace(PLAN, micro_steps=steps), H100) for steps in (1, 3))
    assert thrice["matmuls"] == pytest.approx(3 * once["matmuls"]) and thrice["optimizer"] == once["optimizer"]
    assert once["optimizer"] == pytest.approx(34e9 / (0.9 * 3.35e12))
    assert set(once) == {"matmuls", "optimizer"}


def test_recomputation_is_a_forward_again():
    parts = step_parts(WORK, replace(PLAN, recomputed=1.0), H100)
    assert parts["recomputation"] == pytest.approx(parts["matmuls"] / 3)


def test_kernels_reach_a_share_of_their_rates():
    alone, among = (step_parts(WORK, PLAN, H100, share)["matmuls"] for share in (1.0, RUNNING_SHARE))
    assert among == pytest.approx(alone / RUNNING_SHARE)


def test_traffic_hides_behind_computation_until_there_is_too_much():
    near = step_parts(WORK, replace(PLAN, ranks=8, zero_stage=3), H100)
    wide = step_parts(WORK, replace(PLAN, weights=1e11, trained=1e11, ranks=64, zero_stage=3), H100)
    small_batch = Work(Counter({Matmul(1, 1, 8192, 8192): 10}))
    bare = step_parts(TrainingWork(small_batch, small_batch, Work()), replace(PLAN, ranks=8, zero_stage=3), H100)
    assert near["traffic"] < 0.02 * near["matmuls"]  # of the first layer
    assert wide["traffic"] > wide["matmuls"] and bare["traffic"] > bare["matmuls"]


def test_shards_and_offload():
    sharded = step_parts(WORK, replace(PLAN, ranks=8, zero_stage=1), H100)
    assert sharded["optimizer"] == pytest.approx(step_parts(WORK, PLAN, H100)["optimizer"] / 8)
    offloaded = step_parts(WORK, replace(PLAN, ranks=8, zero_stage=1, offloads=True), H100)
    assert "optimizer" not in offloaded
    assert offloaded["optimizer on the host"] > sharded["optimizer"] and offloaded["offload"] > 0


def test_a_small_model_waits_for_the_host():
    tiny = Work(Counter({Matmul(1, 8, 64, 64): 100}), launches=100)
    parts = step_parts(TrainingWork(tiny, tiny, Work()), PLAN, H100)
    assert parts["launches by the host"] > 10 * parts["matmuls"]


def test_a_measured_cpu_launches_beside_its_work_and_at_its_rates():
    """By hand: 10 products of 2.2e12 FLOPs at 1e9 a second, three times; 10 launches of 1e-5 and 20 of 2e-5 seconds; a
    head of 5 at the forward's and 100 bytes at 50 a second; 1e9 numbers at 1e8 a second; a step and a micro-step
    0.2 and 0.05, for each layer 0.03 and 0.01."""
    costs = host_costs(1e-5, 2e-5, 0.2, 0.05, layer=0.03, layer_micro_step=0.01)
    measured = flat(1e9, costs)._replace(optimizer=((1.0, 1.0), (PLAN.trained, 1e8)))
    cpu = replace(H100, measured=measured)
    parts = step_parts(WORK._replace(head=Work(moved_bytes=100.0, launches=5)), PLAN, cpu)
    assert parts["matmuls"] == pytest.approx(30 * 2 * 16384 * 8192 * 8192 / 1e9)
    assert parts["launches by the host"] == pytest.approx(10e-5 + 20 * 2e-5 + 5e-5)
    assert parts["output layer"] == 2.0 and parts["optimizer"] == 10.0
    assert parts["the step itself"] == pytest.approx(0.25 + PLAN.layers * 0.04)
    thrice = step_parts(WORK, replace(PLAN, micro_steps=3), cpu)
    assert thrice["the step itself"] == pytest.approx(0.2 + 3 * 0.05 + PLAN.layers * (0.03 + 3 * 0.01))
