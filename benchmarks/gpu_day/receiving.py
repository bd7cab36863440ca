"""The other end of a group for weights, as a server's worker is one; part 8 starts it.

python -m benchmarks.gpu_day.receiving PLACE DEVICE BYTES TIMES    PLACE: a `groups.Place` as JSON
"""

from __future__ import annotations

import json
import sys
import time

import torch

from threestep.plugins.vllm.servers.groups import Place, WeightGroup


def main(place: str, device: str, count: str, times: str) -> None:
    """Take so many bytes so often, print the sum of the last, and wait to be ended."""
    group = WeightGroup(Place(**json.loads(place)), 1, torch.device(device))
    data = torch.empty(int(count), dtype=torch.uint8, device=device)
    for _ in range(int(times)):
        group.broadcast(data, 60.0)
    print(json.dumps({"sum": int(data.sum(dtype=torch.int64))}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
