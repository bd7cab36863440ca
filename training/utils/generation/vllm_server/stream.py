"""Weights on their way to a server: frames on a TCP connection that the server's worker opens.

    secret                              of this transfer, from the request that announced it
    frames   length, header, bytes      header: {"name": ..., "dtype": ..., "shape": [...]}, then the tensor's bytes
    end      length, header             {"sums": {layer: sum of bit patterns}}

Both sides of it. Everything is kept until the end has come, so that a transfer that breaks off changes nothing.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any

import torch

SECRET_CHARACTERS = 64
_LENGTH = struct.Struct(">I")
_LONGEST_HEADER = 1 << 24
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}
# Layer -> sum, as `vllm.weights.BitSums` counts them; the layer "" is outside of all.
Sums = dict[str, int]


def framed(name: str, tensor: torch.Tensor) -> tuple[bytes, memoryview]:
    """Return a tensor on the CPU as a frame: its header, and its memory."""
    header = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return _packed(header), memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def end_frame(sums: Sums) -> bytes:
    return _packed({"sums": sums})


def received(host: str, port: int, secret: str, seconds: float) -> tuple[list[tuple[str, torch.Tensor]], Sums]:
    """Take a whole transfer; return its tensors, and the sums that the trainer counted. OSError or ValueError where it
    is not whole. seconds: that it may be silent."""
    tensors: list[tuple[str, torch.Tensor]] = []
    with socket.create_connection((host, port), timeout=seconds) as connection:
        connection.settimeout(seconds)
        connection.sendall(secret.encode("ascii"))
        while True:
            header = _header(connection)
            if "sums" in header:
                return tensors, {str(layer): int(own) for layer, own in header["sums"].items()}
            tensors.append((header["name"], _tensor(connection, header)))


def _packed(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode("utf-8")
    return _LENGTH.pack(len(text)) + text


def _header(connection: socket.socket) -> dict[str, Any]:
    [length] = _LENGTH.unpack(_bytes(connection, _LENGTH.size))
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return json.loads(_bytes(connection, length))


def _tensor(connection: socket.socket, header: dict[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[header["dtype"]], header["shape"]
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    _fill(connection, memoryview(data.numpy()))
    return data.view(dtype).reshape(shape)


def _bytes(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, place: memoryview) -> None:
    while place:
        count = connection.recv_into(place)
        if not count:
            raise ConnectionError("the trainer ended the connection before all weights had come")
        place = place[count:]
