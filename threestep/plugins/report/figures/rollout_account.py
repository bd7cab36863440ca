"""The account of a run's prompts, from its rollouts.jsonl: each is learned from once in an epoch, or named with its
reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_DRAWN = "not drawn: the run ended first"
WAITING = "are drawn, or being drawn, for a later step"
_MOST_GAPS = 1000  # positions that are lost for each that is there: more are no account


@dataclass
class EpochAccount:
    """Prompts of one epoch. left_out: by the reason. lost: positions, counted in the run, that the log passes over.
    twice: rows that were taken more than once."""

    epoch: int
    prompts: int
    learned: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True if every prompt was learned from exactly once or has a reason."""
        return not self.lost and not self.twice and self.learned + self.left_out.total() == self.prompts

    def sentence(self) -> str:
        """Return what became of the prompts."""
        parts = [f"{self.learned:,} of {self.prompts:,} prompts were each trained on once"]
        parts += [f"{count:,} {_why(reason)}" for reason, count in self.left_out.items()]
        parts += [f"LOST: {len(self.lost):,} (positions {_some(self.lost)})"] if self.lost else []
        parts += [f"TWICE: {len(self.twice):,} (rows {_some(self.twice)})"] if self.twice else []
        return f"epoch {self.epoch}: {'; '.join(parts)}"


def rollout_account(lines: Iterable[Mapping[str, Any]]) -> list[EpochAccount]:
    """Return the account of each epoch that the run has reached. lines: of rollouts.jsonl."""
    steps = list(lines)
    trained = dict[int, list[tuple[int, str | None]]]()  # by position: row and reason
    open_positions = dict[int, str]()  # by position: the reason
    width = max((len(line["rows"]) for line in steps if "rows" in line), default=0)
    for line in steps:
        positions = line["positions"] if "positions" in line else range(line["first"], line["first"] + width)
        if "unused" in line:
            open_positions |= dict.fromkeys(positions, str(line["unused"]))
            continue
        if "pending" in line:
            open_positions = dict.fromkeys(line["pending"], WAITING)
        reasons = {row: reason for reason, rows in reversed(line.get("left_out", {}).items()) for row in rows}
        for position, row in zip(positions, line["rows"], strict=False):
            trained.setdefault(position, []).append((row, reasons.get(row)))
    most = _MOST_GAPS * (width + 1) * (len(steps) + 1)
    trained = {position: own for position, own in trained.items() if 0 <= position < most}  # others are damaged
    if not trained:
        return []
    prompts, reached = int(steps[-1]["prompts"]), max(trained) + 1
    epochs = [EpochAccount(epoch + 1, prompts) for epoch in range(-(-reached // prompts))]
    for account in epochs:
        rows = Counter[int]()
        begin, end = (account.epoch - 1) * prompts, account.epoch * prompts
        for position in range(begin, min(end, reached)):
            taken = trained.get(position, [])
            rows.update(row for row, _ in taken)
            account.learned += sum(reason is None for _, reason in taken)
            account.left_out.update(reason for _, reason in taken if reason is not None)
            if not taken and position in open_positions:
                account.left_out[open_positions[position]] += 1
            elif not taken:
                account.lost.append(position)
        later = [reason for position, reason in open_positions.items() if max(begin, reached) <= position < end]
        account.left_out.update(later)
        if (not_drawn := max(0, end - max(begin, reached)) - len(later)) > 0:
            account.left_out[NOT_DRAWN] = not_drawn
        account.twice = sorted(row for row, count in rows.items() if count > 1)
    return epochs


def _why(reason: str) -> str:
    if reason == WAITING:
        return reason
    return f"were not: {reason}" if not reason.startswith("not drawn") else f"were {reason}"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
