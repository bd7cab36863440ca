"""The sources of a step's rollouts: that of prompts, the queue that may decide when and by which weights responses are
drawn, and the log of what became of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import joined_shares
from training.utils.engine.ranks.collectives import gathered
from training.utils.layout.order import ShuffledStream

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import LeftOut, Samples
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, ServerShare
    from training.utils.contracts.rows import PromptRow
    from training.utils.data.rows.documents import PromptBatch
    from training.utils.engine.whole_model import WholeModel
    from training.utils.run.run_folder import RunLog


class Asked(NamedTuple):
    """The prompts of a step's rollouts on this rank, one entry for each, and the request made for them."""

    prompts: Sequence[PromptBatch]
    requests: Sequence[RolloutRequest]


class Times(NamedTuple):
    """Seconds since 1970: the request for a step's rollouts, and the begin and end of their generation on this rank."""

    asked: float
    began: float
    ended: float


@dataclass(frozen=True)
class RolloutsOfStep:
    """The rollouts of a step on this rank. version: steps that the weights had taken, the oldest where they differ.
    waited: seconds of the loop. times: None where a checkpoint had the rollouts. groups: position and version of each
    prompt, where they are no function of the step; pending: positions that wait for the steps to come. shares: of the
    servers that drew them, without those that a checkpoint had."""

    step: int
    version: int
    prompts: Sequence[PromptBatch]
    rollouts: Sequence[Rollout]
    waited: float = 0.0
    times: Times | None = None
    groups: Sequence[tuple[int, int]] = ()
    pending: Sequence[int] = ()
    shares: Mapping[str, ServerShare] = field(default_factory=dict)


class PromptSource:
    """Gives the prompts of every rollout: the dataset's, in shuffled epochs or, if not `shuffled`, in its order. Only
    the position is remembered, by the trainer. States are what JSON holds, the same on every rank. Every method is
    called by all ranks.

    makes_prompts: there may be others than the dataset's.
    """

    makes_prompts = False

    def __init__(self, prompts: Sequence[PromptRow], seed: int, shuffled: bool = True) -> None:
        self.prompts = prompts
        self._stream = ShuffledStream(len(prompts), seed, shuffled)

    def take(self, first: int, count: int) -> list[PromptRow]:
        """Return the prompts at positions first .. first + count - 1 of the run, for all ranks together."""
        return [self.prompts[row] for row in self._stream.take(first, count)]

    def spare(self, seed: int, first: int, count: int) -> list[PromptRow]:
        """Return replacements: the prompts at positions first .. of all there are, in shuffled epochs by `seed`."""
        return [self.prompts[row] for row in ShuffledStream(len(self.prompts), seed).take(first, count)]

    def observe(self, samples: Samples, left_out: Sequence[LeftOut] = ()) -> None:
        """Receive the results of this rank's prompts. left_out: those that were scored and are not trained on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `observe` and `take` change."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ThreestepError(
                f"the saved run chose its prompts with a {' and a '.join(sorted(state))}, but this run uses them "
                "in epochs; restore the saved run's flags"
            )


class Asking(NamedTuple):
    """The means by which a queue draws. lender: the trained model. of_step: what is asked for in a step; of_position:
    for the prompt at a position of the run. Both return the same whenever they are called."""

    settings: PpoSettings
    engine: RolloutEngine
    lender: WholeModel
    of_step: Callable[[int], Asked]
    of_position: Callable[[int], Asked]


class RolloutQueue:
    """Draws the rollouts of steps by weights that may be older than the newest. state_name: of its state in a
    checkpoint."""

    state_name = "rollout_queue"

    def take(self, step: int) -> RolloutsOfStep:
        """Return the rollouts of `step`, which trains next. A collective."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until nothing is drawn any more: before anything else uses the engine."""

    def figures(self) -> dict[str, float]:
        """Return metrics of the rollouts taken last."""
        return {}

    def note_unused(self, events: RolloutEvents, reason: str) -> None:
        """At the end of a run, note the rollouts that were not trained on. A collective."""

    def state_dict(self) -> Any:
        """Return all ranks' rollouts that no step has trained on, as JSON holds them. A collective."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Restore a state of `state_dict`, on any number of ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class RolloutEvents:
    """Writes the log of rollouts: for each step one line of rollouts.jsonl (`run.run_folder` reads it).

        step, version         the step that trained on them; steps that the weights had taken which drew them
        engine                what drew them
        asked, began, ended   seconds since 1970, of each rank: `Times`; none where a checkpoint had the rollouts,
                              or nothing is drawn ahead
        servers               by the address of each rollout server, of all ranks: its `ServerShare` of the responses,
                              without those that a checkpoint had; none with other engines
        waited, trained       seconds that the loop waited for them; when it had trained on them, as the times above
        first, rows           the position of its first prompt in the run; the row of each prompt
        prompts               of the data: positions of an epoch
        left_out              rows that were not learned from, by the reason

    With `--rollouts_ahead free` a step has, in place of `version` and `first`, the schedule from which
    `--replay_schedule` repeats it:

        positions, versions   of each prompt: its position in the run, and the weights that drew its samples, from the
                              first token to the last
        pending               positions that are drawn, or are to be drawn, for the steps to come

    Prompts that nothing trained on, since the run ended, have `unused` with the reason, and no rows.

    log: on the first rank; None on others. engine: its name. prompts: of an epoch. per_step: prompts of a step, of all
    ranks.
    """

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
