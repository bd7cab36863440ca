"""What two runs that ought to be the same left behind, figures of a clock apart."""

from __future__ import annotations

import json
from pathlib import Path

TIMES = (
    "seconds",
    "time/",
    "waiting/",
    "time_per_token_ms/",
    "train/tokens_per_second",
    "train/pairs_per_second",
    "train/mfu",
    "reference/",
    "rollout/speculation_speedup",
    "rollout/servers",
    "rollout/weight_megabytes_sent",  # more to a server that was started again
)


def figures(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """What a run told, without what a clock gave."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    plain = [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines]
    return [line for line in plain if len(line) > 1]  # more than a step
