"""Weights from device to device: a process group of the trainer and the workers of one server, by NCCL or gloo.

Each end makes it of torch alone, beside the groups that it has, as vLLM makes those of its own (0.32,
distributed/utils.py, `stateless_init_torch_distributed_process_group`): training has no vLLM, and a worker's own groups
know nothing of the trainer. One group a server, so that one that fails holds up no other. The trainer is rank 0 and
sends; the workers follow in their order.

Both backends take the same path; a CPU tries all of it but NCCL's own calls.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.protocol import NCCL, TCP

SECRET_BYTES = 32
_TRIAL = 1000  # numbers
_SECONDS_TO_MEET = 120.0
# torch's watchdog of a group would end the whole process when another end is gone. With the first, `wait` raises and
# nothing ends (torch 2.13, ProcessGroupNCCL.cpp); the second leaves out a thread that watches the watchdog.
_ENVIRONMENT = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class End(NamedTuple):
    """A process that weights leave or reach.

    device: torch's word for its kind. nccl: its version; empty without. gpu: its identity; empty on a CPU.
    """

    device: str
    nccl: str
    gpu: str


def own_end(device: torch.device) -> End:
    """Return what this process is on `device`."""
    if device.type != "cuda":
        return End(device.type, "", "")
    version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    return End(device.type, version, str(torch.cuda.get_device_properties(device).uuid))


class Way(NamedTuple):
    """The way of weights to a server. by: TCP, GLOO or NCCL. why: a clause for the log."""

    by: str
    why: str


def chosen_way(flag: str | None, own: End, theirs: Sequence[End]) -> Way:
    """Return how weights go from here to a server's workers. flag: of the user. ServerFailure where that cannot be."""
    hindrance = _why_no_nccl(own, theirs)
    if flag == NCCL and hindrance is not None:
        raise ServerFailure(
            f"weights cannot be sent to it with NCCL, because {hindrance}; leave --rollout_weights_by out"
        )
    if flag is not None:
        return Way(flag, "--rollout_weights_by")
    if hindrance is not None:
        return Way(TCP, f"not NCCL, because {hindrance}")
    return Way(NCCL, f"both ends have GPUs and NCCL {own.nccl}")


def _why_no_nccl(own: End, theirs: Sequence[End]) -> str | None:
    if own.device != "cuda":
        return "training runs on a CPU"
    if not theirs or any(each.device != "cuda" for each in theirs):
        return "the server runs on a CPU"
    others = {each.nccl for each in theirs}
    if not own.nccl or others != {own.nccl}:
        names = "/".join(sorted(each or "none" for each in others))
        return f"the server has NCCL {names} but training has {own.nccl or 'none'}"
    if own.gpu in {each.gpu for each in theirs}:
        return "the server generates on the same GPU that sends the weights, which NCCL does not allow"
    return None


@dataclass(frozen=True)
class Place:
    """A place at which the ends of a group meet. host: the trainer's address. secret: begins the names of what they say
    there. seconds: that meeting may take. size: of the group."""

    by: str
    host: str
    port: int
    secret: str
    seconds: float
    size: int


class WeightGroup:
    """A group that is there. Made by all ends together, who try it; OSError or RuntimeError where it does not come
    about."""

    def __init__(self, place: Place, rank: int, device: torch.device, listening: socket.socket | None = None) -> None:
        """device: where the tensors of this end are. listening: at the place, which is the trainer's."""
        self.device = device
        own_host = place.host if listening is not None else _address_facing(place.host, place.port)
        self._group: Any = None
        wait = timedelta(seconds=place.seconds)
        more: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening.detach()}
        self._store = dist.TCPStore(
            place.host, place.port, is_master=rank == 0, timeout=wait, wait_for_workers=False, **more
        )
        store = dist.PrefixStore(place.secret, self._store)
        made = _nccl(store, rank, place) if place.by == NCCL else _gloo(store, rank, place, own_host)
        self._group = made
        try:
            self._try(rank, place.seconds)
        except BaseException:
            self.close()
            raise

    def _try(self, rank: int, seconds: float) -> None:
        wanted = torch.arange(_TRIAL, dtype=torch.uint8, device=self.device)
        found = wanted.clone() if rank == 0 else torch.zeros_like(wanted)
        self.broadcast(found, seconds)
        if not torch.equal(found, wanted):
            raise RuntimeError("the received bytes differ from the sent ones")

    def broadcast(self, data: torch.Tensor, seconds: float) -> None:
        """Send uint8 numbers from the trainer, over those of the workers. RuntimeError after so many seconds, or where
        an end is gone."""
        if self._group is None:
            raise RuntimeError("the group has been closed")
        if data.numel():
            self._group.broadcast(data, 0, timedelta(seconds=seconds)).wait()

    def close(self) -> None:
        """Give it up; ends that wait in it are let go."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()


def own_device() -> torch.device:
    """Return the device on which this process trains."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def met(client: ServerClient, workers: int, by: str, device: torch.device, *, seconds: float) -> WeightGroup:
    """Return a group with a server of so many workers. device: on which training runs. ServerFailure where it does not
    come about."""
    host = client.local_address()
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listening.getsockname()[1])
    seconds = min(seconds, _SECONDS_TO_MEET)
    place = Place(by, host, port, secrets.token_hex(SECRET_BYTES), seconds, workers + 1)
    over: queue.SimpleQueue[WeightGroup | Exception | None] = queue.SimpleQueue()

    def run(meet: Callable[[], WeightGroup | None]) -> None:
        try:
            over.put(meet())
        except (OSError, RuntimeError, ServerFailure) as problem:
            over.put(problem)

    def ask() -> None:
        client.post("/init_weight_transfer_engine", {"init_info": asdict(place)}, 2.0 * seconds)

    # Threads that do not keep the program alive: who waits for an end that does not come waits for its whole time.
    own = device if by == NCCL else torch.device("cpu")
    for meet in (ask, lambda: WeightGroup(place, 0, own, listening)):
        threading.Thread(target=run, args=[meet], name="meeting a server", daemon=True).start()
    group: WeightGroup | None = None
    for _ in range(2):
        found = over.get()
        if isinstance(found, Exception):
            if group is not None:
                group.close()
            reason = str(found) if isinstance(found, ServerFailure) else type(found).__name__
            raise ServerFailure(f"the group could not be formed ({reason})")
        group = found or group
    assert group is not None
    return group


def _gloo(store: Any, rank: int, place: Place, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=place.seconds)
    return dist.ProcessGroupGloo(store, rank, place.size, options)


def _nccl(store: Any, rank: int, place: Place) -> Any:
    """NCCL chooses its own network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=place.seconds)
    with _in_environment(_ENVIRONMENT):
        return dist.ProcessGroupNCCL(store, rank, place.size, options)


@contextlib.contextmanager
def _in_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _address_facing(host: str, port: int) -> str:
    """Return this machine's address that faces another one, which is there already or soon."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, port))
        return str(probe.getsockname()[0])
