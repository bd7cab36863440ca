"""Records of prime-rl's token exports, `token_exports/step_N/rank_R.jsonl`, version 1. Serves users' scripts.

An export has the tokens of each sequence with log-probabilities and advantages, and no loss of the step: the user may
give its figures. Sequences without a token that counts are not exported. Positions begin again with each document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from threestep.plugins.audit.recording.files import Arrays, RecordHead, StepRecord, check_tensors, checked_settings
from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, read_text

# Ours: theirs. Numbers of tokens; a null stands for a number that is not finite.
_COLUMNS = {
    "logprobs": "trainer_logprobs",
    "old_logprobs": "inference_logprobs",
    "advantages": "advantages",
    "token_losses": "losses",
}


def prime_rl_record(
    folder: str | Path, settings: Mapping[str, Any], figures: Mapping[str, float] | None = None
) -> StepRecord:
    """The record of one step's export. folder: token_exports/step_N; ThreestepError for one without ranks."""
    place = Path(folder)
    ranks = [_rank(place / f"rank_{rank}.jsonl") for rank in range(len(list(place.glob("rank_*.jsonl"))))]
    if not ranks:
        raise ThreestepError(f"{place} has no token exports from prime-rl (rank_0.jsonl and so on)")
    step = place.name.removeprefix("step_")
    own = checked_settings(settings, "settings of prime_rl_record")
    number = int(step) if step.isdigit() else 1
    head = RecordHead("policy", number, len(ranks), own, dict(figures or {}), {"name": "prime-rl"})
    return StepRecord(head, ranks)


def _rank(path: Path) -> Arrays:
    if not path.is_file():
        raise ThreestepError(f"{path} is missing: the token export is incomplete")
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    rows = [checked_json(dict[str, Any], line, f"{path}, row {number}") for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        for name in ("token_ids", "loss_mask"):
            if not isinstance(row.get(name), list):
                raise ThreestepError(f"{path}, row {number}: expected a list '{name}', found only {sorted(row)}")
    lengths = [length for row in rows for length in _documents(row)]
    found: Arrays = {
        "lengths": np.array(lengths, dtype=np.int64),
        "micro_batches": np.array([_micro(rows, number) for number, row in enumerate(rows) for _ in _documents(row)]),
        "token_ids": np.array([token for row in rows for token in row["token_ids"]], dtype=np.int64),
        "loss_mask": np.array([bool(counts) for row in rows for counts in row["loss_mask"]], dtype=bool),
    }
    for name, theirs in _COLUMNS.items():
        if all(theirs in row for row in rows):
            values = [np.nan if value is None else value for row in rows for value in row[theirs]]
            found[name] = np.array(values, dtype=np.float32)
    check_tensors(found, str(path))
    return found


def _micro(rows: Sequence[Mapping[str, Any]], number: int) -> int:
    """The micro-batch of a row; a row without `micro_step` is one by itself."""
    return int(rows[number].get("micro_step", number))


def _documents(row: Mapping[str, Any]) -> list[int]:
    """The lengths of a row's documents."""
    positions = row.get("position_ids") or list(range(len(row["token_ids"])))
    begins = [place for place, position in enumerate(positions) if position == 0 or place == 0]
    return [end - begin for begin, end in zip(begins, [*begins[1:], len(positions)], strict=True)]
