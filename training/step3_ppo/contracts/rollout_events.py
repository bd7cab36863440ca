"""The log of rollouts: for each step one line of rollouts.jsonl (`run.rollout_log` reads it).

    step, version         the step that trained on them; steps that the weights had taken which drew them
    engine                what drew them
    asked, began, ended   seconds since 1970, of each rank: `pipeline.Times`; none where a checkpoint had the rollouts,
                          or nothing is drawn ahead
    servers               by the address of each rollout server, of all ranks: its `ServerShare` of the responses,
                          without those that a checkpoint had; none with other engines
    waited, trained       seconds that the loop waited for them; when it had trained on them, as the times above
    first, rows           the position of its first prompt in the run; the row of each prompt
    prompts               of the data: positions of an epoch
    left_out              rows that were not learned from, by the reason

With `--rollouts_ahead free` a step has, in place of `version` and `first`, the schedule from which `--replay_schedule`
repeats it:

    positions, versions   of each prompt: its position in the run, and the weights that drew its samples, from the first
                          token to the last
    pending               positions that are drawn, or are to be drawn, for the steps to come

Prompts that nothing trained on, since the run ended, have `unused` with the reason, and no rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.step3_ppo.contracts.records import Times
from training.utils.contracts.rollout_engine import joined_shares
from training.utils.engine.ranks.collectives import gathered

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import RolloutsOfStep
    from training.utils.run.run_log import RunLog


@dataclass(frozen=True)
class RolloutEvents:
    """Writes the log. log: on the first rank; None on others. engine: its name. prompts: of an epoch. per_step: prompts
    of a step, of all ranks."""

    log: RunLog | None
    engine: str
    prompts: int
    per_step: int

    def trained(self, drawn: RolloutsOfStep, outcomes: Sequence[tuple[int, str | None]]) -> None:
        """Note the step that trained on these rollouts. outcomes: of the prompts of all ranks, each one's row and why
        it was left out, or None. A collective."""
        times = [own for own in gathered(drawn.times) if own is not None]
        left_out: dict[str, list[int]] = {}
        for row_id, reason in outcomes:
            if reason is not None:
                left_out.setdefault(reason, []).append(row_id)
        clock: dict[str, Any] = {name: [getattr(own, name) for own in times] for name in Times._fields} if times else {}
        if shares := joined_shares(gathered(drawn.shares)):
            clock["servers"] = {address: own._asdict() for address, own in sorted(shares.items())}
        self._write(
            {
                **(self._scheduled(drawn) if drawn.groups else self._step(drawn.step, drawn.version)),
                **clock,
                "waited": drawn.waited,
                "trained": time.time(),
                "rows": [row_id for row_id, _ in outcomes],
                "left_out": left_out,
            }
        )

    def unused(self, pending: Sequence[tuple[int, int]], reason: str) -> None:
        """Note rollouts on which nothing will be trained. pending: step and version of each."""
        for step, version in pending:
            self._write({**self._step(step, version), "unused": reason})

    def unused_groups(self, step: int, positions: Sequence[int], reason: str) -> None:
        """Note groups on which nothing will be trained after `step`. positions: this rank's. A collective."""
        found = sorted(position for own in gathered([*positions]) for position in own)
        if found:
            self._write({**self._run(step), "positions": found, "unused": reason})

    def _scheduled(self, drawn: RolloutsOfStep) -> dict[str, Any]:
        """A collective. Ranks hold every world_size-th prompt."""
        groups, pending = zip(*gathered(([*drawn.groups], [*drawn.pending])), strict=True)
        every = [group for place in zip(*groups, strict=True) for group in place]
        return {
            **self._run(drawn.step),
            "positions": [position for position, _ in every],
            "versions": [version for _, version in every],
            "pending": sorted(position for own in pending for position in own),
        }

    def _step(self, step: int, version: int) -> dict[str, Any]:
        return {**self._run(step), "version": version, "first": (step - 1) * self.per_step}

    def _run(self, step: int) -> dict[str, Any]:
        return {"step": step, "engine": self.engine, "prompts": self.prompts}

    def _write(self, line: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append([json.dumps(line)])
