"""Prompts that adapt to the policy: a sampler that returns to the worst prompts, and a dataset that grows.

    bash scripts/step3_ppo.sh ... --prompt_sampler examples/curriculum.py:WorstAgain
    bash scripts/step3_ppo.sh ... --prompt_dataset examples/curriculum.py:SureQuestions

Both may be used together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from threestep.plugins.curriculum.prompts import PromptDataset, PromptSampler, RolloutResults


class WorstAgain(PromptSampler):
    """Every prompt once, in order; then those with the lowest last mean score."""

    def __init__(self, prompts: Sequence[Any], seed: int) -> None:
        super().__init__(prompts, seed)
        self._asked = 0
        self._places: dict[str, int] = {}  # by uid, of every prompt used so far
        self._scores: dict[str, float] = {}

    def take(self, first: int, count: int) -> list[int]:
        new = list(range(self._asked, min(self._asked + count, len(self.prompts))))
        self._asked += len(new)
        taken = [uid for uid in self._scores if uid in self._places]  # others have replaced some
        worst = sorted(taken, key=lambda uid: (self._scores[uid], uid))
        worst_places = [self._places[uid] for uid in worst]
        self._places |= {self.prompts[place].uid: place for place in new}
        selected = new + worst_places[: count - len(new)]
        return (selected * count)[:count]  # repeats some if a rollout takes more prompts than there are

    def update(self, uids: Sequence[str], scores: Sequence[float]) -> None:
        own: dict[str, list[float]] = {}
        for uid, score in zip(uids, scores, strict=True):
            own.setdefault(uid, []).append(score)
        self._scores |= {uid: sum(values) / len(values) for uid, values in own.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self._asked, "places": self._places, "scores": self._scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._asked = state["asked"]
        self._places, self._scores = dict(state["places"]), dict(state["scores"])


class SureQuestions(PromptDataset):
    """Asks a follow-up question about the best response of each rollout."""

    def on_batch_end(self, results: RolloutResults) -> None:
        best = max(range(len(results.scores)), key=results.scores.__getitem__)
        row = results.rows[best]
        asked_again = f"{row.prompt_text} {results.responses[best].strip()} Human: Are you sure? Assistant:"
        self.add(asked_again, ground_truth=row.reference, **{**row.columns, "asked_again": True})
