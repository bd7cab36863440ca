"""Training calls in a row in one process: `python calls_program.py PLACE CALLS`, as test_calls.py runs it.

What the process holds is counted behind each call: threads, open files, signal handlers, process groups, tensors.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
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


def held() -> dict[str, Any]:
    import psutil
    import torch

    gc.collect()
    process = psutil.Process()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return {
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "group": torch.distributed.is_initialized(),
        "variables": sorted(name for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ),
        "elements": sum(tensor.numel() for tensor in tensors),
    }


def main() -> None:
    import pyarrow

    import threestep

    # Arrow's pools take another worker, up to their size, where tasks meet: by the moment, in any call.
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
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
