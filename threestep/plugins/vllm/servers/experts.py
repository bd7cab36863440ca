"""The experts of a response on their way from a server: asked for by the name of its request when it is over.

An answer of vLLM has a place for them, which a CPU leaves empty (`vllm.experts`); so a server's worker notes them, and
hands them out by a call of its own.

T tokens of a prompt and its response, L layers, K experts of a token.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import torch

from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure

_BYTES = 2  # of an int16


def packed_experts(found_TLK: torch.Tensor) -> dict[str, Any]:
    """Return int16 [T, L, K] as JSON has it."""
    data = found_TLK.contiguous().numpy().astype("<i2").tobytes()
    return {"shape": list(found_TLK.shape), "data": base64.b64encode(data).decode("ascii")}


def taken_experts(client: ServerClient, name: str, tokens: int, seconds: float) -> torch.Tensor:
    """Return the experts of a request of `client` that is over, int16 [T, L, K]; T is `tokens` or more. ServerFailure
    if it has none."""
    answer = client.post("/collective_rpc", {"method": "threestep_experts", "args": [name]}, seconds)
    results = answer.get("results") if isinstance(answer, dict) else None
    found = results[0] if isinstance(results, list) and results and isinstance(results[0], dict) else {}
    shape = found.get("shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(isinstance(each, int) and each > 0 for each in shape)):
        raise ServerFailure("it has no experts for a response that it generated")
    try:
        data = base64.b64decode(str(found.get("data")), validate=True)
    except binascii.Error as problem:
        raise ServerFailure(f"it sent experts that cannot be read ({problem})") from problem
    if len(data) != math.prod(shape) * _BYTES or shape[0] < tokens:
        raise ServerFailure(f"it sent experts for {shape[0]} tokens in {len(data)} bytes, but read {tokens} tokens")
    return torch.frombuffer(bytearray(data), dtype=torch.int16).view(shape)
