"""Every accepted key of DeepSpeed's JSON changes a run on two ranks as its documentation says, and nothing else: the
weights at the end are those of a run without it, unless the key is one that rounds or clips."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import set_log_level_from_string
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from threestep.plugins.deepspeed_json.keys import ACCEPTED
from threestep.plugins.deepspeed_json.users_json import UsersJson
from training.utils.engine.checkpoint_files import load_engine
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import DTYPES
from training.utils.engine.training_engine import TrainingEngine

STEPS = 3
SMALL = {"stage3_param_persistence_threshold": 0}  # nothing stays whole
LOGGER = {"enabled": True, "verbose": True}
MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@dataclass(frozen=True)
class Case:
    """A key's value beside others, and what changes by it.

    sees: what must differ from the run without the key: "ops", the collectives; "weights"; a name of SEEN; or a text
    that DeepSpeed prints with the key alone. Weights must not differ otherwise.
    beside: of the same JSON, with and without the key. without: instead of `beside`, in the run without it.
    bad: steps with a gradient that is not finite. skips: one step leaves a block out. loads: a checkpoint is read.
    """

    value: Any
    sees: str = "ops"
    stage: int = 2
    dtype: str = "fp32"
    beside: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] | None = None
    bad: tuple[int, ...] = ()
    skips: bool = False
    loads: bool = False


def zero3(value: Any, sees: str = "ops", **beside: Any) -> Case:
    return Case(value, sees, 3, beside={"zero_optimization": {**SMALL, **beside}})


def scaled(value: Any, bad: tuple[int, ...] = (), **beside: Any) -> Case:
    return Case(value, "scales", 2, "fp16", {"fp16": {"initial_scale_power": 4, **beside}}, bad=bad)


def offloaded(value: Any, sees: str, stage: int, section: str, **beside: Any) -> Case:
    return Case(value, sees, stage, beside={"zero_optimization": {section: beside}} if beside else {})


CASES: dict[str, Case] = {
    "gradient_clipping": Case(0.01, "weights"),
    "communication_data_type": Case("bf16", "ops+weights"),
    "log_level": Case("info", "Reduce bucket size"),
    "steps_per_print": Case(2, "step=2,", beside={"log_level": "info"}),
    "dump_state": Case(True, "DeepSpeedEngine:", beside={"log_level": "info"}),
    "wall_clock_breakdown": Case(True, "time (ms)"),
    "memory_breakdown": Case(True, "Engine before forward"),
    "comms_logger.enabled": Case(True, "comm op:", beside={"comms_logger": {"verbose": True}}),
    "comms_logger.verbose": Case(True, "comm op:", beside={"comms_logger": {"enabled": True}}, without={}),
    "comms_logger.prof_all": Case(False, "logged", beside={"comms_logger": LOGGER}),
    "comms_logger.prof_ops": Case(
        ["all_reduce"], "comm op: all_reduce", beside={"comms_logger": {**LOGGER, "prof_all": False}}
    ),
    "comms_logger.debug": Case(True, "Caller Func", beside={"comms_logger": LOGGER}),
    "timers.throughput.enabled": Case(True, "timed"),
    "timers.throughput.synchronized": Case(False, "waits", beside={"timers": {"throughput": {"enabled": True}}}),
    "data_types.grad_accum_dtype": Case("bf16", "weights", 3, "bf16"),
    "bf16.immediate_grad_update": Case(True, "hooks", 1, "bf16"),
    "bf16.bf16_master_weights_and_grads": Case(True, "masters+weights", 2, "bf16", {"bf16": MASTERS}, {}),
    "bf16.bf16_optimizer_states": Case(True, "moments+weights", 3, "bf16", {"bf16": MASTERS}, {}),
    "fp16.loss_scale": scaled(8),
    "fp16.initial_scale_power": Case(5, "scales", 2, "fp16"),
    "fp16.loss_scale_window": scaled(1),
    "fp16.hysteresis": scaled(1, bad=(1,)),
    "fp16.consecutive_hysteresis": scaled(True, bad=(0, 2)),
    "fp16.min_loss_scale": scaled(12, bad=(1,), hysteresis=1),
    "disable_python_gc": Case(True, "collects"),
} | {
    "zero_optimization." + key: case
    for key, case in {
        "contiguous_gradients": Case(False, "buffers"),
        "reduce_scatter": Case(False, "ops", 3),
        "reduce_bucket_size": Case(20),
        "use_multi_rank_bucket_allreduce": Case(False),
        "round_robin_gradients": Case(True, "order"),
        "parameter_alignment": Case(True, "padding"),
        "overlap_comm": Case(True, "buffers"),
        "offload_optimizer.device": offloaded("cpu", "offload", 2, "offload_optimizer"),
        "offload_optimizer.pin_memory": offloaded(False, "pinned", 2, "offload_optimizer", device="cpu"),
        "offload_param.device": offloaded("cpu", "offload_param", 3, "offload_param"),
        "offload_param.pin_memory": offloaded(False, "pinned_param", 3, "offload_param", device="cpu"),
        "sub_group_size": Case(30, "ops", 3),
        "stage3_prefetch_bucket_size": zero3(0),
        "stage3_param_persistence_threshold": Case(0, "ops", 3),
        "stage3_model_persistence_threshold": Case(20, "ops", 3),
        "stage3_max_live_parameters": zero3(0),
        "stage3_max_reuse_distance": zero3(0, stage3_prefetch_bucket_size=0),
        "stage3_use_all_reduce_for_fetch_params": zero3(True),
        "stage3_allgather_sequential": zero3(True),
        "leaf_module.classes": zero3(["Block"]),
        "leaf_module.names": zero3(["blocks.0"]),
        "leaf_module.name_suffixes": zero3(["0"]),
        "zero_hpz_partition_size": zero3(2, "secondary"),
        "memory_efficient_linear": zero3(False, "linear"),
        "pipeline_loading_checkpoint": replace(zero3(True, "loading"), loads=True),
        "log_trace_cache_warnings": replace(zero3(True, "Invalidate trace cache"), skips=True),
        "enable_sanity_checks": zero3(True),
    }.items()
}  # fmt: skip

# Together, and at other stages: weights as without.
TOGETHER: dict[str, tuple[Case, dict[str, Any]]] = {
    "hpz with offload in bf16": (
        replace(zero3(None), dtype="bf16"),
        {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    ),
    "hpz with overlap": (zero3(None), {"zero_hpz_partition_size": 2, "overlap_comm": True}),
    "overlap and its bucket": (Case(None), {"overlap_comm": True, "reduce_bucket_size": 20}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 7)
        self.down = nn.Linear(7, 7)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """Two blocks, of which the last lends a layer that is used again. `how`: "bad" has a gradient of NaN; "short"
    leaves a block out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(7, 1)

    def forward(self, inputs: torch.Tensor, how: str) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for block in self.blocks[1 if how == "short" else 0 :]:
            hidden = block(hidden)
        loss = self.last(self.blocks[-1].up(hidden)).float().square().mean()
        return loss + (hidden[0, 0].float() * 0).sqrt() if how == "bad" else loss


class Collectives(TorchDispatchMode):
    """Counts collectives and their elements, by name and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [part for part in _leaves(args) if isinstance(part, torch.Tensor)]
            dtypes = {str(tensor.dtype) for tensor in tensors}
            name = func.name().split("::")[1] + " " + " ".join(sorted(dtypes))
            count = self.found.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += sum(tensor.numel() for tensor in tensors)
        return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


# What a case may look at, of DeepSpeed's engine after the last step.
SEEN: dict[str, Callable[[Any], Any]] = {
    "collects": lambda engine: gc.isenabled(),
    "timed": lambda engine: engine.tput_timer.global_step_count,
    "hooks": lambda engine: len(engine.optimizer._grad_acc_hooks),
    "masters": lambda engine: str(engine.optimizer.single_partition_of_fp32_groups[0].dtype),
    "moments": lambda engine: str(next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].dtype),
    "order": lambda engine: engine.optimizer.round_robin_bit16_indices,
    "padding": lambda engine: engine.optimizer.round_robin_bit16_padding,
    "offload": lambda engine: engine.optimizer.cpu_offload,
    "pinned": lambda engine: engine.optimizer.cpu_offload_pin_memory,
    "offload_param": lambda engine: engine.optimizer.offload_param,
    "pinned_param": lambda engine: engine.optimizer.offload_param_pin_memory,
    "secondary": lambda engine: [part.ds_secondary_tensor is None for part in engine.module.parameters()],
    "linear": lambda engine: torch.nn.functional.linear.__name__,
}  # fmt: skip


def run(case: Case, config: dict[str, Any], ranks: Any, folder: Path) -> dict[str, Any]:
    """Train Net for STEPS steps of two micro-batches under this JSON."""
    linear, synchronize = torch.nn.functional.linear, type(get_accelerator()).synchronize
    waits: list[None] = []
    type(get_accelerator()).synchronize = lambda self, device_index=None: waits.append(None)
    said, console = io.StringIO(), logging.getLogger("DeepSpeed").handlers[0]
    stream = console.setStream(said)  # type: ignore[attr-defined]
    try:
        with contextlib.redirect_stdout(said):
            report = _trained(case, config, ranks, folder)
    finally:
        console.setStream(stream)  # type: ignore[attr-defined]
        torch.nn.functional.linear = linear
        type(get_accelerator()).synchronize = synchronize
        ranks.leaving.close()  # DeepSpeed collects garbage at each engine, and would go through all that are left
        set_log_level_from_string("error")
        deepspeed.comm.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    text = said.getvalue()
    return {**report, "said": text, "logged": text.count("comm op:"), "waits": len(waits)}


def _trained(case: Case, config: dict[str, Any], ranks: Any, folder: Path) -> dict[str, Any]:
    path = folder / f"ds_{ranks.rank}.json"
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    settings = EngineSettings(
        dtype=case.dtype, zero_stage=case.stage, learning_rate=1e-2, max_grad_norm=0.0, own_config=UsersJson(str(path))
    )
    engine = TrainingEngine(Net().to(dtype), settings, ranks, 8)
    buffers: list[int] = []
    if "buffers" in case.sees:
        engine.module.first.weight.register_hook(lambda gradient: buffers.append(_buffers(engine.engine)))
    scales: list[float] = []
    with Collectives() as collectives:
        for step in range(STEPS):
            how = "bad" if step in case.bad else "short" if case.skips and step == 2 else ""
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + ranks.rank)
                loss = engine(torch.randn(4, 6, generator=generator).to(dtype), how)
                engine.backward(loss / (2 * ranks.world_size))
            engine.step()
            scales.append(float(engine.engine.optimizer.loss_scale) if case.dtype == "fp16" else 1.0)
    weights = [weight.detach().float().flatten() for _, weight in engine.full_tensors(engine.module)]
    seen = {name: SEEN[name](engine.engine) for name in case.sees.split("+") if name in SEEN}
    loading = Collectives()
    if case.loads:
        engine.engine.save_checkpoint(str(folder / "checkpoint"), tag="a", save_latest=False)
        with loading:
            load_engine(engine.engine, folder / "checkpoint", "a")
    return {
        "ops": collectives.found, "weights": torch.cat(weights).tolist(), "buffers": buffers, "scales": scales,
        "loading": loading.found, **seen,
    }  # fmt: skip


def _buffers(engine: Any) -> int:
    """Buckets that gradients are copied to, while a backward goes on."""
    return sum(len(bucket.buffer) for bucket in engine.optimizer.ipg_buckets.values())


def with_key(dotted: str, case: Case) -> dict[str, Any]:
    config = json.loads(json.dumps(case.beside))
    place = config
    *sections, name = dotted.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = case.value
    return config


def runs() -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """(name, case, JSON with the key) of every run."""
    for dotted, case in CASES.items():
        yield dotted, case, with_key(dotted, case)
    for name, (case, zero) in TOGETHER.items():
        yield name, case, {"zero_optimization": {**case.beside.get("zero_optimization", {}), **zero}}


def without_key(case: Case) -> tuple[str, Case]:
    """The run that a case is compared with, as a name that equal ones share; it looks at all that they look at."""

    def name(one: Case) -> str:
        config = one.beside if one.without is None else one.without
        return json.dumps([config, one.stage, one.dtype, one.bad, one.skips, one.loads])

    sharing = [one for _, one, _ in runs() if name(one) == name(case)]
    return name(case), replace(case, sees="+".join(sorted({one.sees for one in sharing})))


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """Train tiny engines, one for each accepted key of DeepSpeed's JSON (CASES) and one without it. Return collectives,
    what was printed, weights at the end, and what the case looks at. DeepSpeed refuses float16 on a CPU; here its word
    for that is changed, so that loss scales can be seen."""
    type(get_accelerator()).is_fp16_supported = lambda self: True
    gc.freeze()  # DeepSpeed collects at each engine, and would walk all that is imported
    results: dict[str, Any] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, case, config in runs():
        key, looks = without_key(case)
        if key not in plain:
            plain[key] = run(looks, json.loads(key)[0], ranks, out)
        results[name] = [plain[key], run(case, config, ranks, out)]
    return results


AGREED = {"zero_optimization.stage", "bf16.enabled", "fp16.enabled"}  # refused where they differ from the flags
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]  # on a busy machine


@pytest.fixture
def reports(launched) -> dict:
    return launched("test_deepspeed_keys", 2)[1][0]


def test_every_accepted_key_is_tried():
    assert set(CASES) == set(ACCEPTED) - AGREED


@pytest.mark.parametrize("dotted", CASES)
def test_it_changes_what_it_is_for(reports, dotted):
    without, with_key = reports[dotted]
    kinds = CASES[dotted].sees.split("+")
    for kind in kinds:
        if kind in with_key:
            assert with_key[kind] != without[kind], kind
        else:
            assert kind in with_key["said"] and kind not in without["said"]
    if "weights" not in kinds and "scales" not in kinds:
        assert with_key["weights"] == pytest.approx(without["weights"], abs=1e-6)


@pytest.mark.parametrize("name", TOGETHER)
def test_together_they_leave_the_weights_alone(reports, name):
    without, together = reports[name]
    assert together["weights"] == pytest.approx(without["weights"], abs=1e-6)
