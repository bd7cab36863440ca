"""Real vLLM servers of these tests, on the loopback address, started by scripts/serve.sh."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from training.utils.base.machine import free_port

ROOT = Path(__file__).parents[5]
KEY = "a key of tests"
_START_SECONDS = 420.0


@dataclass
class Server:
    """One that is starting or running. process: leads a group of its own."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while not self._is_there():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(self.log.read_text(errors="replace")[-4000:])
            time.sleep(0.5)

    def _is_there(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with suppress(OSError):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(model: Path, folder: Path, *flags: str) -> Server:
    """Start a server of a model without a tokenizer, of 64 tokens in float32; it is not there yet."""
    port = free_port()
    log = folder / f"server_{port}.log"
    environment = {
        **os.environ,
        "VLLM_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
        "THREESTEP_VENV": "none",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = ["bash", str(ROOT / "scripts" / "serve.sh"), str(model), "--port", str(port), "--dtype", "float32"]
    words += ["--skip-tokenizer-init", "--max-model-len", "64", "--kv-cache-memory-bytes", "50000000", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=ROOT
        )
    return Server(port, process, log)


@contextmanager
def started_servers(model: Path, folder: Path, count: int, *flags: str) -> Iterator[list[Server]]:
    """So many servers of a model, which end with the block."""
    servers = [start(model, folder, *flags) for _ in range(count)]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
