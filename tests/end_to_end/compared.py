"""What two runs that ought to be the same left behind, figures of a clock apart."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.support.json_lines import read_lines

# More is sent to a server that was started again.
TIMES = tuple(
    """seconds time/ waiting/ time_per_token_ms/ train/tokens_per_second train/pairs_per_second train/mfu reference/
    rollout/speculation_speedup rollout/servers rollout/weight_megabytes_sent""".split()
)


def same(unbroken: Path, resumed: Path, models: tuple[str, ...] = ("model",)) -> None:
    """Their figures are equal, and their models to the bit."""
    assert figures(unbroken) == figures(resumed)
    for model in models:
        mine, other = (load_file(folder / model / "model.safetensors") for folder in (unbroken, resumed))
        assert mine.keys() == other.keys()
        assert all(mine[name].equal(other[name]) for name in mine), model


def figures(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """What a run told, without what a clock gave."""
    lines = read_lines(folder / name)
    plain = [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines]
    return [line for line in plain if len(line) > 1]  # more than a step
