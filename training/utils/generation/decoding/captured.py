"""A function that is called again and again with its tensors in fixed places: on CUDA, a graph of its kernels.

A graph is started by one call of the host. Decoding needs that: a forward of one token is a thousand small kernels, and
the host takes longer to start them than the GPU to compute them. Knows no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

# Of a mask: torch's memory-efficient kernel copies one of another width, in every layer (torch 2.13).
ALIGNED_COLUMNS = 16


class CapturedStep:
    """Calls `function`, which reads and writes tensors in fixed places, and returns one.

    On CUDA its kernels are captured once, after one ordinary call, and replayed: so `function` must give the same when
    it is called twice, and must not depend on anything of the host that changes. What it returns is overwritten by the
    next call. On other devices each call is an ordinary one.
    """

    def __init__(
        self, function: Callable[[], torch.Tensor], device: torch.device, before: CapturedStep | None = None
    ) -> None:
        """before: a step that is no longer called; its memory is used again. RuntimeError if `function` makes the host
        wait for the device, which a graph cannot hold."""
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph, self._output = _graph_of(function, before._graph if before is not None else None)

    def __call__(self) -> torch.Tensor:
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._output


def _graph_of(
    function: Callable[[], torch.Tensor], before: torch.cuda.CUDAGraph | None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph and the tensor that each replay fills."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    # Libraries take their workspaces at a first call. What waits is found here, since a capture that fails half-way
    # leaves torch's allocator in it.
    with torch.cuda.stream(aside), _waits_are_errors():
        function()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    pool = None if before is None else before.pool()
    # Another thread may copy the next batch to the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = function()
    return graph, output


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
