"""The rows that are kept of the drawn responses, as steps 1 and 2 read them: prompt, chosen, rejected.

A response that was cut has no end of its own, and steps 1 and 2 would add one: it is kept only on request. An empty one
is never kept: they drop rows with one. A response is rejected only by one with a higher reward and another text;
without one the row has no pair, which step 2 counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = dict[str, Any]
_CARRIED = ("ground_truth", "data_source")


class KeepFlags(Protocol):
    """The flags that decide."""

    keep_best: int
    min_reward: float | None
    keep_cut: bool


@dataclass
class Kept:
    """rows: in the order of the prompts. pairs: how many of them have a rejected response. left_out: prompts without a
    row, by reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def pairs(self) -> int:
        return sum(row["rejected"] is not None for row in self.rows)


def kept_rows(drawn: Sequence[Mapping[str, Any]], flags: KeepFlags) -> Kept:
    """Return the rows of all prompts. drawn: as `drawing` has it."""
    kept = Kept()
    for prompt in drawn:
        reason = _add(kept.rows, prompt, flags)
        if reason:
            kept.left_out[reason] += 1
    return kept


def _add(rows: list[Row], prompt: Mapping[str, Any], flags: KeepFlags) -> str:
    """Append a prompt's rows; return why it has none, or ""."""
    ranked = _ranked(prompt, flags.keep_cut)
    if not ranked:
        return "cut_or_empty"
    reward = prompt["reward"]
    chosen = [place for place in ranked if flags.min_reward is None or reward[place] >= flags.min_reward]
    if not chosen:
        return "below_min_reward"
    for place, worst in zip(chosen[: flags.keep_best], reversed(ranked), strict=False):
        has_pair = reward[worst] < reward[place]
        rows.append(
            {
                "prompt": prompt["prompt"],
                "chosen": _as_response(prompt, place),
                "rejected": _as_response(prompt, worst) if has_pair else None,
                "chosen_reward": reward[place],
                "rejected_reward": reward[worst] if has_pair else None,
                **{name: prompt[name] for name in _CARRIED if prompt.get(name) is not None},
            }
        )
    return ""


def _ranked(prompt: Mapping[str, Any], keep_cut: bool) -> list[int]:
    """Return the places of different responses, best first; of equal rewards the first that was drawn. Cut and empty
    ones are left out."""
    by_text: dict[str, int] = {}
    best_first = sorted(range(len(prompt["responses"])), key=lambda place: -prompt["reward"][place])
    for place in best_first:
        text = prompt["responses"][place]
        if text.strip() and (keep_cut or prompt["ended"][place]):
            by_text.setdefault(text, place)
    return list(by_text.values())


def _as_response(prompt: Mapping[str, Any], place: int) -> Any:
    """A response in the form of its prompt: text, or messages."""
    text = prompt["responses"][place]
    return text if isinstance(prompt["prompt"], str) else [{"role": "assistant", "content": text}]
