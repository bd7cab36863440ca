"""A made-up machine, whose memory and seconds a person can follow; measured CPUs; and dry runs on a small shape."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from threestep.plugins.plan.choices import Settings, Wanted
from threestep.plugins.plan.clock.devices import HostCosts, Measured
from threestep.plugins.plan.dry_run.estimate import Estimate
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice


@pytest.fixture
def wanted() -> Callable[..., Wanted]:
    def build(ranks: int = 4, gpu_bytes: int = 1000, sequences: int = 16, host_bytes: int = 1000) -> Wanted:
        return Wanted("h100", ranks, sequences, (8, 8), gpu_bytes, host_bytes, {"model_name_or_path": "m"})

    return build


@pytest.fixture
def estimates() -> Callable[[Settings], Estimate]:
    """800 bytes of a model, a quarter of them with ZeRO-3, on the host with offload; 100 of a sequence in a forward, 25
    recomputed. A micro-step takes 2 s and 1 a sequence, half as much again recomputed; ZeRO-3 1 s; offload 5 s a step.
    """

    def estimate(settings: Settings) -> Estimate:
        recomputes, size = settings["gradient_checkpointing"], settings["per_device_train_batch_size"]
        model = 200 if settings["zero_stage"] == 3 else 800
        held = MemoryLine("model", 0, model) if settings["offload"] else MemoryLine("model", model)
        forward = Moment("in a backward", (MemoryLine("activations", (25 if recomputes else 100) * size),))
        steps = settings["gradient_accumulation_steps"]
        parts = {"matmuls": steps * (2.0 + size), "traffic": steps * float(settings["zero_stage"] == 3)}
        parts["recomputation"] = 0.5 * parts["matmuls"] * recomputes
        parts["offload"] = 5.0 * settings["offload"]
        return Estimate([], [held], [forward], PlannedDevice(True, 1000), lambda: parts, None)

    return estimate


def flat(rate: float, costs: HostCosts, *, optimizer: float = 1e8, head: float = 50.0, cached: float = 1e9) -> Measured:
    """A CPU of the same rates at every size. rate: FLOP/s of products. optimizer: numbers a second; head, cached:
    bytes a second; 1e12 of other operators."""
    points, memory = ((1.0, rate),), ((1.0, 1e12),)
    return Measured(((1.0, points),), costs, ((1.0, optimizer),), head, ((1.0, points),), cached, (memory, memory))


def host_costs(forward: float, backward: float, *others: float, **named: Any) -> HostCosts:
    """forward, backward: seconds of an operator, whatever its bytes."""
    return HostCosts(((1.0, forward),), ((1.0, backward),), *others, **named)


SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=512,
             max_position_embeddings=128)  # fmt: skip


@pytest.fixture
def dry_run(tmp_path, capsys) -> Callable[..., str]:
    """What a step's dry run says of a small Llama of 2 or more layers, of which it leaves nothing. fits: else it is
    refused at its end."""

    def run(main: Any, *flags: str, layers: int = 2, roles: tuple[str, ...] = ("",), fits: bool = True) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
        words = ["--data_path", "embedded", "--output_dir", str(tmp_path / "run"), "--dry_run", "true"]
        for role in roles:
            words += [f"--{role}model_name_or_path", str(tmp_path)]
        refused = pytest.raises(ThreestepError, match="^this does not fit on a GPU of ")
        with contextlib.nullcontext() if fits else refused:
            assert main([*words, *flags]) is None
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().out

    return run
