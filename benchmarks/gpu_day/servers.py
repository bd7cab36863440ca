"""Part 8: weights to rollout servers from GPU to GPU by NCCL, and a vLLM server on a GPU that follows training."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.models import config_of, random_model, sequence
from benchmarks.gpu_day.record import NotHere, Report
from threestep.plugins.vllm.servers.arguments import VllmServerArguments
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.servers.groups import Place, WeightGroup
from threestep.plugins.vllm.servers.protocol import GLOO, NCCL
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling

ROOT = Path(__file__).parents[2]
TIMES, UPDATES = 5, 3
SECONDS_TO_NOTICE = 5.0
_SECONDS_TO_START = 420.0


def measure(report: Report) -> None:
    """The server first, then the group, and last what could end this process."""
    report.case("a vLLM server", "log-probabilities of three updates", lambda: _served(report))
    report.case("a group of two ends", "bytes a second", lambda: _sent(report))
    report.case("a group of two ends", "an end that is killed", lambda: _killed(report))


def _ends() -> tuple[str, torch.device, str]:
    """Return the backend, and the device of each end: GPUs, or where there is none the CPU, to try the case itself."""
    if machine.device().type == "cpu":
        return GLOO, torch.device("cpu"), "cpu"
    if torch.cuda.device_count() < 2:
        raise NotHere("NCCL takes a GPU once alone, and one is here")
    return NCCL, torch.device("cuda", 0), "cuda:1"


@contextlib.contextmanager
def _met(report: Report, times: int) -> Iterator[tuple[WeightGroup, torch.Tensor, subprocess.Popen[str]]]:
    """A group with another process, and what it takes so often."""
    by, own, other = _ends()
    listening = socket.create_server(("127.0.0.1", 0))
    place = Place(by, "127.0.0.1", listening.getsockname()[1], secrets.token_hex(32), 120.0, 2)
    count = 2**30 if report.full else 2**20
    words = [sys.executable, "-m", "benchmarks.gpu_day.receiving", json.dumps(asdict(place)), other]
    process = subprocess.Popen([*words, str(count), str(times)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        group = WeightGroup(place, 0, own, listening)
        yield group, torch.randint(0, 256, (count,), dtype=torch.uint8, device=own), process
        group.close()
    finally:
        process.kill()
        process.wait()


def _sent(report: Report) -> dict[str, Any]:
    seconds = []
    with _met(report, TIMES) as (group, data, process):
        for _ in range(TIMES):
            started = time.perf_counter()
            group.broadcast(data, 60.0)
            seconds.append(time.perf_counter() - started)
        assert process.stdout is not None
        arrived = json.loads(process.stdout.readline())["sum"]
    median = statistics.median(seconds[1:])
    right = arrived == int(data.sum(dtype=torch.int64))
    return {"by": _ends()[0], "GB": len(data) / 1e9, "GB/s": len(data) / 1e9 / median, "right": right}


def _killed(report: Report) -> dict[str, Any]:
    """Return how long the sender waits for an end that is gone, and that it lives."""
    with _met(report, 1) as (group, data, process):
        group.broadcast(data, 60.0)
        process.kill()
        process.wait()
        started, said = time.perf_counter(), "nothing"
        try:
            for _ in range(3):
                group.broadcast(data, SECONDS_TO_NOTICE)
        except RuntimeError as problem:
            said = type(problem).__name__
        waited = time.perf_counter() - started
    time.sleep(2.0)  # a watchdog would end this process now
    return {"by": _ends()[0], "waited seconds": waited, "of": SECONDS_TO_NOTICE, "it says": said}


def _served(report: Report) -> dict[str, Any]:
    """Return how weights went to a server on the last GPU, and how far its log-probabilities are from the training
    forward's after each of three updates."""
    if importlib.util.find_spec("vllm") is None:
        raise NotHere("vllm is not installed")
    folder, model = report.place / "served", _model(report)
    model.save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["VLLM_API_KEY"] = secrets.token_hex(16)
    words = ["bash", str(ROOT / "scripts" / "serve.sh"), str(folder), "--port", str(port), "--max-model-len", "64"]
    words += ["--dtype", str(model.dtype).removeprefix("torch."), "--skip-tokenizer-init"]
    words += ["--gpu-memory-utilization", "0.3"] if report.full else ["--kv-cache-memory-bytes", "50000000"]
    last = {"CUDA_VISIBLE_DEVICES": str(torch.cuda.device_count() - 1)} if torch.cuda.is_available() else {}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (report.place / "server.log").open("wb") as log:
        server = subprocess.Popen(
            words,
            env={**os.environ, **last, "THREESTEP_VENV": "none", "PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _followed(model, f"http://127.0.0.1:{port}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _model(report: Report) -> Any:
    if report.full:
        return random_model("1300m", torch.bfloat16, machine.device())
    from transformers import AutoModelForCausalLM

    config = config_of("tiny", 64)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32  # vLLM knows none below
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(machine.device()).eval()


class _Lent:
    """A model that is trained by adding noise."""

    is_sharded = trains_adapters_alone = False

    def __init__(self, model: Any) -> None:
        self.model, self.updates = model, 0

    def send(self, take: Any) -> None:
        take(iter(self.model.named_parameters()))

    def step(self) -> None:
        self.updates += 1
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.02)


def _followed(model: Any, address: str) -> dict[str, Any]:
    actor = _Lent(model)
    engine = VllmServerRollout(None, VllmServerArguments(address, _SECONDS_TO_START), 64)
    engine.check(None, None)  # type: ignore[arg-type]
    ids_BP = torch.stack([sequence(8, model.config.vocab_size, seed).input_ids for seed in range(8)])
    sampling = Sampling(16, temperature=1.0, top_k=0, top_p=1.0, end_token_id=0, pad_token_id=1)
    request = RolloutRequest(ids_BP, torch.ones_like(ids_BP).bool(), sampling, range(8))
    apart, seconds = list[float](), list[float]()
    for _ in range(UPDATES):
        with engine.lent(actor) as lent:  # type: ignore[arg-type]
            rollout = engine.roll_out(lent, request)
        seconds.append(engine.figures()["time/weights_to_servers"])
        ids_BT = torch.cat([ids_BP, rollout.response_ids_BR], dim=1).to(machine.device())
        with torch.no_grad():
            logits = model(ids_BT).logits[:, ids_BP.shape[1] - 1 : -1].float()
        own_BR = logits.log_softmax(-1).gather(-1, ids_BT[:, ids_BP.shape[1] :, None]).squeeze(-1).cpu()
        difference_BR = (own_BR - rollout.sampled_logprobs_BR).abs()
        apart.append(float(difference_BR[rollout.response_mask_BR].mean()))
        actor.step()
    [way] = engine.ways().values()
    return {
        "by": way.by, "why": way.why, "log-probabilities apart": max(apart), "at first": apart[0],
        "seconds of weights": statistics.median(seconds[1:]), "the first": seconds[0],
    }  # fmt: skip
