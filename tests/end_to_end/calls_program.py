"""Training calls in a row in one process: `python calls_program.py PLACE CALLS`, as test_calls.py runs it.

What the process holds is counted behind each call: threads, open files, signal handlers, process groups, tensors.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROWS = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}", "rejected": f" {a + b + 1}"}
    for a in range(6)
    for b in range(4)
]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["rejected"]} for row in ROWS]
SETTINGS: dict[str, Any] = {
    "max_train_steps": 1, "report": False, "report_mfu": False, "per_device_train_batch_size": 4, "max_seq_len": 48,
    "learning_rate": 1e-2,
}  # fmt: skip


def lengths(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    return [float(len(response)) for response in responses]


def _threads(process: Any) -> int:
    """The threads now, after a moment: one that is about to end is not held."""
    time.sleep(0.1)
    return int(process.num_threads())


def held() -> dict[str, Any]:
    """What this process holds."""
    import psutil
    import torch

    gc.collect()
    process = psutil.Process()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return {
        "threads": min(_threads(process) for _ in range(6)),
        "files": process.num_fds(),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "group": torch.distributed.is_initialized(),
        "variables": sorted(name for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ),
        "elements": sum(tensor.numel() for tensor in tensors),
    }


def main() -> None:
    import threestep

    place, calls = Path(sys.argv[1]), int(sys.argv[2])
    shared = {**SETTINGS, "data_output_path": str(place / "cache")}
    start = str(place / "start")
    own: list[Any] = [
        lambda: threestep.sft(start, ROWS, **shared, zero_stage=3),
        lambda: threestep.dpo(start, PAIRS, **shared, zero_stage=1, dtype="bf16"),
        lambda: threestep.sft(start, ROWS, **shared, output_dir=str(place / "again")),
    ]
    os.chdir(place)
    counts, results = [], []
    for call in range(calls):
        results.append(own[call % len(own)]())
        counts.append(held())
    told = {"counts": counts, "folders": [str(result.folder) for result in results]}
    told["figures"] = [result.figures for result in results]
    (place / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
