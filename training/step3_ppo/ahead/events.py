"""The log of rollouts that are drawn ahead: for each step one line of rollouts.jsonl (`run.rollout_account` reads it).

    step, version         the step that trained on them; steps that the weights had taken which drew them
    engine                what drew them
    asked, began, ended   seconds since 1970, of each rank: `pipeline.Times`; none where a checkpoint had the rollouts
    waited                seconds that the loop waited for them
    first, rows           the position of its first prompt in the run; the row of each prompt
    prompts               of the data: positions of an epoch
    left_out              rows that were not learned from, by the reason

Steps that nothing trained on, since the run ended, have `unused` with the reason, and no rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.step3_ppo.ahead.pipeline import Times
from training.utils.engine.ranks.collectives import gathered

if TYPE_CHECKING:
    from training.step3_ppo.ahead.pipeline import RolloutsOfStep
    from training.step3_ppo.learning.outcomes import PromptOutcome
    from training.utils.run.run_log import RunLog


@dataclass(frozen=True)
class RolloutEvents:
    """Writes the log. log: on the first rank; None on others. engine: its name. prompts: of an epoch. per_step: prompts
    of a step, of all ranks."""

    log: RunLog | None
    engine: str
    prompts: int
    per_step: int

    def trained(self, drawn: RolloutsOfStep, outcomes: Sequence[PromptOutcome]) -> None:
        """Note the step that trained on these rollouts. outcomes: of the prompts of all ranks. A collective."""
        times = [own for own in gathered(drawn.times) if own is not None]
        left_out: dict[str, list[int]] = {}
        for row_id, reason in outcomes:
            if reason is not None:
                left_out.setdefault(reason, []).append(row_id)
        clock = {name: [getattr(own, name) for own in times] for name in Times._fields} if times else {}
        self._write(
            {
                **self._step(drawn.step, drawn.version),
                **clock,
                "waited": drawn.waited,
                "rows": [row_id for row_id, _ in outcomes],
                "left_out": left_out,
            }
        )

    def unused(self, pending: Sequence[tuple[int, int]], reason: str) -> None:
        """Note rollouts on which nothing will be trained. pending: step and version of each."""
        for step, version in pending:
            self._write({**self._step(step, version), "unused": reason})

    def _step(self, step: int, version: int) -> dict[str, Any]:
        first = (step - 1) * self.per_step
        return {"step": step, "version": version, "engine": self.engine, "first": first, "prompts": self.prompts}

    def _write(self, line: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append([json.dumps(line)])
