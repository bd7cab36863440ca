"""The loss from hidden states at a large vocabulary: forward and backward, seconds and peak memory.

    python -m benchmarks.competitors.head --how threestep|torch|whole --tokens 4096 --vocabulary 128000 --hidden 512

torch: `torch.nn.functional.linear_cross_entropy`, chunked. whole: all logits at once, then cross entropy.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from torch import nn
from torch.nn import functional

from training.utils.models.token_model import TargetHead


def main() -> None:
    """Run and print one JSON line a step; `peak_bytes` is what the process grew by, gradients included."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True, choices=("threestep", "torch", "whole"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    torch.manual_seed(0)
    head = nn.Linear(arguments.hidden, arguments.vocabulary, bias=False, dtype=dtype)
    hidden_MH = torch.randn(arguments.tokens, arguments.hidden, dtype=dtype, requires_grad=True)
    target_ids_M = torch.randint(0, arguments.vocabulary, (arguments.tokens,))
    loss_of = {"threestep": _threestep, "torch": _torch, "whole": _whole}[arguments.how]
    before = _peak_bytes()
    for _ in range(arguments.steps):
        started = time.perf_counter()
        loss = loss_of(head, hidden_MH, target_ids_M)
        loss.backward()
        seconds = time.perf_counter() - started
        head.weight.grad = hidden_MH.grad = None
        figures = {"units": arguments.tokens, "seconds": seconds, "peak_bytes": _peak_bytes() - before}
        print(json.dumps({**figures, "loss": float(loss.detach())}), flush=True)


def _threestep(head: nn.Linear, hidden_MH: torch.Tensor, target_ids_M: torch.Tensor) -> torch.Tensor:
    return -TargetHead(head)(hidden_MH, target_ids_M).logprobs_M.mean()


def _torch(head: nn.Linear, hidden_MH: torch.Tensor, target_ids_M: torch.Tensor) -> torch.Tensor:
    options = nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden_MH, head.weight, target_ids_M, options=options)


def _whole(head: nn.Linear, hidden_MH: torch.Tensor, target_ids_M: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden_MH).float(), target_ids_M)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
