"""Weights on their way to a server: frames on a TCP connection that the server's worker opens, or in a file.

Where both ends are of a group (`groups`), the bytes of tensors go by it, and the rest by the connection.

    secret                              of this transfer, from the request that announced it; none in a file
    frames   length, header, bytes      header: {"name": ..., "dtype": ..., "shape": [...]}, then the tensor's bytes;
                                        of an adapter also {"part": "down" or "up", "scale": ..., "transposed": ...}
    end      length, header             {"sums": {layer: sum of bit patterns}}

Both sides of it. Everything is kept until the end has come, so that a transfer that breaks off changes nothing.
"""

from __future__ import annotations

import io
import json
import math
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from threestep.plugins.vllm.weights import BitSums

if TYPE_CHECKING:
    from threestep.plugins.vllm.servers.groups import WeightGroup

SECRET_CHARACTERS = 64
_LENGTH = struct.Struct(">I")
_LONGEST_HEADER = 1 << 24
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}
# Layer -> sum, as `vllm.weights.BitSums` counts them; the layer "" is outside of all.
Sums = dict[str, int]


class Frame(NamedTuple):
    """A tensor as it came. of_adapter: part, scale and transposed; None of a weight."""

    name: str
    tensor: torch.Tensor
    of_adapter: tuple[str, float, bool] | None = None


def framed(frame: Frame) -> tuple[bytes, memoryview]:
    """Return a tensor on the CPU as its header and its memory."""
    return header_of(frame), data_of(frame.tensor).numpy().data


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 on its device."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def header_of(frame: Frame) -> bytes:
    """Return what goes before a tensor's bytes."""
    tensor = frame.tensor
    header: dict[str, Any] = {"name": frame.name, "dtype": str(tensor.dtype).removeprefix("torch.")}
    header["shape"] = list(tensor.shape)
    if frame.of_adapter is not None:
        header |= dict(zip(("part", "scale", "transposed"), frame.of_adapter, strict=True))
    return _packed(header)


def end_frame(sums: Sums) -> bytes:
    return _packed({"sums": sums})


def received(
    host: str, port: int, secret: str, seconds: float, *, group: WeightGroup | None = None
) -> tuple[list[Frame], Sums]:
    """Take a whole transfer into the host's memory; return its frames, and the sums that the trainer counted. OSError,
    ValueError or RuntimeError where it is not whole. seconds: that it may be silent. group: by which tensors come."""
    with socket.create_connection((host, port), timeout=seconds) as connection:
        connection.settimeout(seconds)
        connection.sendall(secret.encode("ascii"))
        with connection.makefile("rb", buffering=0) as source:
            return _whole(source, group, seconds)


def read(path: str) -> tuple[list[Frame], Sums]:
    """As `received`, from a file."""
    with open(path, "rb", buffering=0) as source:
        return _whole(source)


def _whole(source: io.RawIOBase, group: WeightGroup | None = None, seconds: float = 0.0) -> tuple[list[Frame], Sums]:
    frames: list[Frame] = []
    while True:
        header = _header(source)
        if "sums" in header:
            return frames, {str(layer): int(own) for layer, own in header["sums"].items()}
        more = (header["part"], header["scale"], header["transposed"]) if "part" in header else None
        dtype, shape = _DTYPES[header["dtype"]], header["shape"]
        count = math.prod(shape) * dtype.itemsize
        data = _read(source, count) if group is None else _followed(group, count, seconds)
        frames.append(Frame(header["name"], data.view(dtype).reshape(shape), more))


def _packed(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode("utf-8")
    return _LENGTH.pack(len(text)) + text


def _header(source: io.RawIOBase) -> dict[str, Any]:
    [length] = _LENGTH.unpack(_bytes(source, _LENGTH.size))
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return json.loads(_bytes(source, length))


def _read(source: io.RawIOBase, count: int) -> torch.Tensor:
    data = torch.empty(count, dtype=torch.uint8)
    _fill(source, data.numpy().data)
    return data


def _followed(group: WeightGroup, count: int, seconds: float) -> torch.Tensor:
    data = torch.empty(count, dtype=torch.uint8, device=group.device)
    group.broadcast(data, seconds)
    return data.cpu()


def _bytes(source: io.RawIOBase, count: int) -> bytes:
    data = bytearray(count)
    _fill(source, memoryview(data))
    return bytes(data)


def _fill(source: io.RawIOBase, place: memoryview) -> None:
    while place:
        count = source.readinto(place)
        if not count:
            raise ConnectionError("the transfer ended before all weights had arrived")
        place = place[count:]


def sums_of(frames: Iterable[Frame]) -> BitSums:
    """Return the sums of what is in frames."""
    sums = BitSums()
    for name, tensor, _ in frames:
        sums.add(name, tensor)
    return sums


def with_adapters(base: Mapping[str, torch.Tensor], frames: Iterable[Frame]) -> dict[str, torch.Tensor]:
    """Return weights with the adapters in `frames` added, as PEFT merges them: in float32, rounded to the weight's
    dtype."""
    whole, downs = dict(base), dict[str, torch.Tensor]()
    for name, tensor, of_adapter in frames:
        if of_adapter is None:
            continue
        part, scale, transposed = of_adapter
        if part == "down":
            downs[name] = tensor
            continue
        delta_OI = (tensor.float() @ downs[name].float()) * scale
        whole[name] = base[name] + (delta_OI.t() if transposed else delta_OI).to(base[name].dtype)
    return whole
