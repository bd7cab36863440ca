"""Signs that a reward is gamed, in the log of a run's evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.report.gaming.account import account_of
from threestep.plugins.report.gaming.sentences import signs_of_gaming
from threestep.plugins.report.gaming.values import Values, values_of
from training.utils.base.console import log
from training.utils.contracts.run import EvaluationObserver
from training.utils.flags.step import step_of

if TYPE_CHECKING:
    from pathlib import Path

    from training.utils.contracts.run import EvaluatedRun
    from training.utils.run.run_folder import RunFolder


def open_watch(run: EvaluatedRun) -> RewardWatch | None:
    """Return the watch of a step whose responses are rewarded; None for others."""
    reward = run.settings.get("reward")
    if not reward:
        return None
    method = step_of(run.settings).label_of(run.settings)
    return RewardWatch(run.folder, values_of(reward, run.settings["checker"]), method)


@dataclass(frozen=True)
class RewardWatch(EvaluationObserver):
    """Compares each evaluation with the first."""

    folder: RunFolder
    values: Values
    method: str

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the signs since the first evaluation, on the main rank alone."""
        for sign in self.signs(step, samples):
            log(f"{self.method}: after rollout {step:,}, {sign}; see this section of the report")

    def signs(self, step: int, samples: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the signs as sentences; none on ranks but the main one."""
        if not step or not self.folder.is_main_rank:
            return []
        account = account_of(first_samples(self.folder.path), samples, self.values)
        return [] if account is None else signs_of_gaming(account)


def first_samples(run: Path) -> list[dict[str, Any]]:
    """Return the samples of the first evaluation in samples.jsonl, but for greedy ones."""
    path = run / "samples.jsonl"
    first: list[dict[str, Any]] = []
    if not path.is_file():
        return first
    with open(path, encoding="utf-8") as file:
        for sample in map(json.loads, file):
            if first and sample["step"] != first[0]["step"]:
                break
            if not sample.get("greedy"):
                first.append(sample)
    return first
