"""In the process that pretends: loads the device, patches what torch's CPU build lacks in Python, and counts.

`pretend` comes before the first import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

_ROOT = str(Path(__file__).parents[3])
_KINDS = {b"w": "waits", b"h": "to_device", b"d": "from_device", b"o": "operators"}
_GIGABYTE = 1 << 30


@dataclass
class Counts:
    """By kind (`waits`, `to_device`, `from_device`, `operators`): how often what happened, as "NAME at FILE:LINE".

    The line is the innermost one of training/ or of a plugin; "backward" stands for what autograd starts by itself.
    """

    found: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in _KINDS.values()})

    def total(self, kind: str) -> int:
        return sum(self.found[kind].values())

    def totals(self) -> dict[str, int]:
        return {kind: self.total(kind) for kind in self.found}

    def lines(self) -> list[str]:
        """All but the operators, in words."""
        return [
            f"{count} {kind}: {what}"
            for kind, several in self.found.items()
            if kind != "operators"
            for what, count in several.most_common()
        ]


_LISTENING: list[Counts] = []


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what happens inside, in every thread."""
    counts = Counts()
    _LISTENING.append(counts)
    try:
        yield counts
    finally:
        _LISTENING.remove(counts)


def _where() -> str:
    frame: FrameType | None = sys._getframe(1).f_back
    if frame is None:  # a thread of autograd's
        return "backward"
    while frame is not None:
        name = frame.f_code.co_filename
        for place in ("training", "threestep/plugins"):
            if f"/{place}/" in name and "/site-packages/" not in name:
                return f"{place}/{name.split(f'/{place}/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _note(kind: bytes, name: bytes) -> None:
    if _LISTENING:
        told = f"{name.decode()} at {_where()}"
        for counts in _LISTENING:
            counts.found[_KINDS[kind]][told] += 1


_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char, ctypes.c_char_p)(_note)


def pretend(library: Path) -> None:
    """Give this process its device, until it ends."""
    assert "torch" not in sys.modules, "torch was imported before its pretended GPU"
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.listen(_LISTENER)
    import torch
    import torch._dynamo  # which lists the functions of torch.cuda by identity

    _patch_cuda(torch.cuda)
    _patch_collectives()


class _Stream:
    """Of streams and events there is one, at whose end all is done."""

    cuda_stream, device, stream_id = 0, None, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 1.0

    def wait_stream(self, *_: object) -> None: ...

    wait_event = record_stream = record = wait = wait_stream

    def record_event(self, event: object = None) -> object:
        return _Stream() if event is None else event

    def synchronize(self) -> None:
        _note(b"w", b"synchronize")


def _patch_cuda(cuda: Any) -> None:
    """What Python asks of CUDA. Random numbers are the CPU's, and so is the state of their generator."""
    import torch

    def nothing(*_: Any, **__: Any) -> None: ...

    def zero(*_: Any, **__: Any) -> int:
        return 0

    for name in (
        "set_device", "_lazy_init", "init", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed",
        "manual_seed_all", "reset_max_memory_allocated", "reset_max_memory_cached", "_lazy_call",
    ):  # fmt: skip
        setattr(cuda, name, nothing)
    for name in (
        "current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "memory_cached", "max_memory_cached", "_exchange_device", "_maybe_exchange_device", "utilization",
    ):  # fmt: skip
        setattr(cuda, name, zero)
    properties = SimpleNamespace(
        name="a pretended GPU", major=9, minor=0, total_memory=80 * _GIGABYTE, multi_processor_count=132,
        shared_memory_per_block_optin=0, warp_size=32, uuid="pretended",
    )  # fmt: skip
    cuda.is_available = cuda.is_initialized = cuda.is_bf16_supported = lambda *_, **__: True
    cuda._initialized = True
    cuda._is_in_bad_fork = cuda.is_current_stream_capturing = lambda: False
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: properties.name
    cuda.mem_get_info = lambda *_: (80 * _GIGABYTE, 80 * _GIGABYTE)
    cuda.memory_stats = lambda *_: Counter()
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = zero
    cuda.default_generators = (torch.default_generator,)
    cuda.synchronize = lambda *_: _note(b"w", b"synchronize")
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = cuda.current_stream = cuda.default_stream = lambda *_: _Stream()


def _patch_collectives() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend `fake`

    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend != "nccl":
            return original(backend, *args, **kwargs)
        return original("fake", store=FakeStore(), rank=0, world_size=1)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
