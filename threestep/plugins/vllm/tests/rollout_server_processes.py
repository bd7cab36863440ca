"""Fake rollout servers in processes of their own, some of which are killed while a run draws by them.

One that is killed is started again at its address, without weights, or stays dead. Processes are forked: see
`forked_runs`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer
from training.utils.base.machine import free_port

LIVING = 2  # servers that are killed, if at all, one at a time, and started again
_SAYS = {"architectures": ["LlamaForCausalLM"], "longest_tokens": 100_000}


@dataclass(frozen=True)
class Disturbance:
    """kills: of servers that are started again. dead: servers that are killed for good. delay_seconds: that an answer
    takes at most. How long it takes, and when servers die, no seed decides; the first dies once the file `begin` is
    there. mean_seconds: of answers that take a time of an exponential distribution, a function of the request, in place
    of that; a server gives `slots` at a time."""

    begin: Path
    kills: int = 0
    dead: int = 0
    delay_seconds: float = 0.0
    mean_seconds: float | None = None
    slots: int = 64


@contextmanager
def server_processes(addresses: Path, disturbance: Disturbance) -> Iterator[None]:
    """Servers until the block ends. addresses: the file for --vllm_servers."""
    ports = [free_port() for _ in range(LIVING + disturbance.dead)]
    addresses.write_text("".join(f"http://127.0.0.1:{port}\n" for port in ports))
    os.environ["VLLM_API_KEY"] = KEY
    supervisor = os.fork()
    if supervisor == 0:
        os.setsid()
        _supervise(ports, disturbance)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)


def _supervise(ports: Sequence[int], disturbance: Disturbance) -> None:
    """In a process of its own, which ends by a signal."""
    dice, parent = random.SystemRandom(), os.getppid()
    processes = {port: _started(port, disturbance) for port in ports}
    victims = [(dice.choice(ports[:LIVING]), True) for _ in range(disturbance.kills)]
    victims += [(port, False) for port in ports[LIVING:][: disturbance.dead]]
    dice.shuffle(victims)
    while not disturbance.begin.exists() and os.getppid() == parent:
        time.sleep(0.1)
    for port, returns in victims if os.getppid() == parent else ():
        time.sleep(dice.uniform(3.0, 6.0))
        os.kill(processes[port], signal.SIGKILL)
        os.waitpid(processes[port], 0)
        print(f"the server at {port} is killed, and {'is started again' if returns else 'stays dead'}", flush=True)
        if returns:
            time.sleep(dice.uniform(0.0, 0.5))
            processes[port] = _started(port, disturbance)
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)  # what started it was killed


def _started(port: int, disturbance: Disturbance) -> int:
    process = os.fork()
    if process == 0:
        try:
            _LateServer(disturbance, port)
            threading.Event().wait()
        finally:
            os._exit(1)
    return process


class _LateServer(FakeServer):
    def __init__(self, disturbance: Disturbance, port: int) -> None:
        super().__init__(_SAYS, port)
        self._disturbance = disturbance
        self._slots = threading.Semaphore(disturbance.slots)

    def on_inference_v1_generate(self, body: Any) -> Any:
        seconds = random.SystemRandom().uniform(0.0, self._disturbance.delay_seconds)
        if self._disturbance.mean_seconds is not None:
            dice = random.Random(f"{body['token_ids']} {body['sampling_params']['seed']}")
            seconds = dice.expovariate(1.0 / self._disturbance.mean_seconds)
        with self._slots:
            time.sleep(seconds)
        return super().on_inference_v1_generate(body)
