"""Two records of one step, quantity by quantity: ours, and another trainer's of the same weights and rows.

    python -m threestep.plugins.audit.tests.other_trainers.agreements OURS THEIRS

Sequences are matched by their token ids. The exit code is 1 where a quantity differs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from threestep.plugins.audit.recording.files import StepRecord, read_record

TENSORS = ("loss_mask", "logprobs", "old_logprobs", "ref_logprobs", "advantages")
FIGURES = ("loss", "denominator", "grad_norm", "learning_rate")
TOLERANCE = {"loss_mask": 0.0, "advantages": 1e-4}  # relative to 1 + the size; others: float32's rounding of sums
USUAL = 2e-5


def numbers_of(record: StepRecord, name: str) -> dict[bytes, list[np.ndarray]]:
    """The numbers of the real tokens of each sequence, by its token ids; of log-probabilities those that count."""
    found: dict[bytes, list[np.ndarray]] = defaultdict(list)
    for rank in record.ranks:
        if name not in rank:
            continue
        begins = np.cumsum([0, *rank["lengths"]])
        for begin, end in zip(begins, begins[1:], strict=False):
            real = rank.get("is_real", np.ones(begins[-1], dtype=bool))[begin:end].copy()
            real[np.flatnonzero(rank["loss_mask"][begin:end]).max(initial=0) + 1 :] = False  # some pad without a mask
            counts = rank["loss_mask"][begin:end][real]
            values = rank[name][begin:end][real].astype(np.float64)
            ids = rank["token_ids"][begin:end][real].astype(np.int64)
            found[ids.tobytes()].append(values if name == "loss_mask" else np.where(counts, values, 0.0))
    return {key: sorted(values, key=lambda row: row.tolist()) for key, values in found.items()}


def compared(ours: StepRecord, theirs: StepRecord) -> list[tuple[str, str, float]]:
    """For each quantity that both have: its name, how many numbers or sequences, the largest relative distance."""
    found = []
    for name in TENSORS:
        own, other = numbers_of(ours, name), numbers_of(theirs, name)
        if not own or not other:
            continue
        shared = sorted(own.keys() & other.keys())
        rows = sum(len(values) for values in own.values())
        alone = rows - sum(min(len(own[key]), len(other[key])) for key in shared)
        if alone:
            found.append((name, f"{alone} of {rows} sequences have no counterpart", np.inf))
            continue
        apart = [
            np.max(np.abs(one - two) / (1.0 + np.abs(two)), initial=0.0)
            for key in shared
            for one, two in zip(own[key], other[key], strict=True)
        ]
        found.append((name, f"{sum(len(row) for key in shared for row in own[key])} numbers", float(max(apart))))
    of_ours, of_theirs = figures_of(ours), figures_of(theirs)
    for name in FIGURES:
        if name in of_ours and name in of_theirs:
            one, two = of_ours[name], of_theirs[name]
            found.append((name, f"{one:.7g} and {two:.7g}", abs(one - two) / (1e-3 + abs(two))))
    return found


def figures_of(record: StepRecord) -> dict[str, float]:
    """The figures, with a loss that is the sum of its recorded parts."""
    found = dict(record.head.figures)
    if "loss" not in found and "policy_loss" in found:
        found["loss"] = found["policy_loss"] + float(record.head.settings["kl_coef"]) * found.get("kl_loss", 0.0)
    return found


def samples_of(record: StepRecord) -> list[dict[str, object]]:
    """The rollout of a record of one rank, group by group: token ids of prompts and responses, and scores."""
    rank = record.ranks[0]
    begins = np.cumsum([0, *rank["lengths"]])
    scores = dict(zip(rank["rollout_numbers"].tolist(), rank["rollout_scores"].tolist(), strict=True))
    groups = dict(zip(rank["rollout_numbers"].tolist(), rank["rollout_groups"].tolist(), strict=True))
    found = []
    for place, number in enumerate(rank["numbers"].tolist()):
        part = slice(begins[place], begins[place + 1])
        real = rank["is_real"][part] if "is_real" in rank else np.ones(rank["lengths"][place], dtype=bool)
        ids, drawn = rank["token_ids"][part][real], rank["loss_mask"][part][real]
        sample = {"prompt": ids[~drawn].tolist(), "response": ids[drawn].tolist(), "score": scores[number]}
        found.append((groups[number], number, sample))
    return [sample for _, _, sample in sorted(found, key=lambda one: one[:2])]


def differs(name: str, apart: float) -> bool:
    return not apart <= TOLERANCE.get(name, USUAL)


def main(argv: list[str]) -> int:
    found = compared(*(read_record(Path(folder)) for folder in argv))
    for name, words, apart in found:
        print(f"{name:<14} {'differs' if differs(name, apart) else 'agrees':<8} {words}, apart {apart:.2g}")
    return int(any(differs(name, apart) for name, _, apart in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
