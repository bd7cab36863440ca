"""Rollouts that are drawn ahead of training and learned from as they end (`--rollouts_ahead free`).

A group, a prompt with its samples, is the unit: several are drawn at a time, each by the newest weights of the moment
in which it is begun, from its first token to its last. `admission` says how many may be begun, and which of those that
have ended a step takes. So timing decides which weights draw a group and which step learns from it, and nothing else:
with that schedule (rollouts.jsonl) a run is repeated to the bit. Each rank has groups of its own, every world_size-th
position.

An engine that holds weights of its own (servers) holds one version for all groups that are being drawn: when newer ones
are there, no group is begun until those that are have ended and it has taken them (`held`).

The prompts of a step stand in the order of their positions. Knows neither losses nor rewards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.ahead.held_weights import HeldWeights
from threestep.plugins.ahead.kept_model import kept_model
from threestep.plugins.ahead.saved import loaded_rollout, saved_rollouts
from training.step3_ppo.contracts.rollouts import Asked, RolloutQueue, RolloutsOfStep, Times
from training.step3_ppo.experience.dynamic_sampling import joined_rollouts
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import ServerShare, joined_shares, rolled_out
from training.utils.data.rows.documents import collate_prompts
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.whole_model import empty_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.ahead.admission import Admission
    from threestep.plugins.ahead.kept_model import KeptModel
    from threestep.plugins.ahead.schedule import GroupSchedule
    from training.step3_ppo.contracts.rollouts import RolloutEvents
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.engine.whole_model import WholeModel

GROUPS_AT_ONCE = 4  # that a rank draws, each in a thread, by copies of the model
GROUPS_ELSEWHERE = 32  # by an engine that holds the weights


@dataclass(eq=False)
class _Group:
    """asked: one prompt. version, kept: of the weights, once it is begun. rollout, shares: once it has ended."""

    position: int
    asked: Asked
    version: int | None = None
    kept: KeptModel | None = None
    rollout: Rollout | None = None
    times: list[float] = field(default_factory=lambda: [time.time()])
    shares: dict[str, ServerShare] = field(default_factory=dict)


class FreeRollouts(RolloutQueue):
    """Draws groups while training goes on, and gives each step a batch of those that have ended.

    admission: of this rank. batches: the prompts of a step, in so many rollouts. lender: the trained model.
    ask: what to ask for at a position of the run. schedule: None leaves it to time.
    in_background: False draws before the step in place of beside it, by its own weights.
    """

    state_name = "rollouts_ahead"

    def __init__(
        self,
        admission: Admission,
        batches: int,
        engine: RolloutEngine,
        lender: WholeModel,
        *,
        ask: Callable[[int], Asked],
        schedule: GroupSchedule | None = None,
        in_background: bool = True,
    ) -> None:
        self.admission, self._batches = admission, batches
        self._engine, self._lender, self._ask = engine, lender, ask
        self._schedule, self._in_background = schedule, in_background
        self._rank, self._ranks = lender.engine.ranks.rank, lender.engine.ranks.world_size
        self._changed = threading.Condition()  # guards all below
        self._admitted = self._step = 0
        self._waiting: list[_Group] = []  # to be begun
        self._drawing: list[_Group] = []
        self._ended: list[_Group] = []  # in the order in which they did
        self._newest: tuple[int, KeptModel] | None = None
        self._pauses = True
        self._problem: BaseException | None = None
        self._copies: list[PreTrainedModel] = []  # in which no thread draws
        self._held = HeldWeights(engine, each=schedule is not None) if engine.takes_weights else None
        self._is_changing = False
        self._taken: RolloutsOfStep | None = None
        self._idle_since: float | None = None  # when nothing was drawn any more
        self._idle_seconds = self._drawing_waited = 0.0

    # For the loop.

    def take(self, step: int) -> RolloutsOfStep:
        """Let groups be begun by the weights before `step`, which trains next, and wait for its batch. A collective."""
        kept = kept_model(self._lender)
        if self._newest is None:
            self._copies = self._drawn_as(kept)
        started = time.monotonic()
        with self._changed:
            self._newest, self._pauses, self._step = (step - 1, kept), False, step
            self._drawing_waited, self._idle_seconds = self._idle(), 0.0
            self._idle_since = None if self._drawing else time.monotonic()
            self._admit(step, kept)
            self._hold(step - 1, kept)
            self._hire()
            while (groups := self._batch(step)) is None:
                self._raise_problem()
                self._wait_or_draw()
            self._ended = [group for group in self._ended if group not in groups]
            self._taken = self._rollouts_of(step, groups, time.monotonic() - started)
        return self._taken

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts taken last: the age of their weights, and who waited for whom, in seconds of this
        rank."""
        assert self._taken is not None
        ages = [self._taken.step - 1 - version for _, version in self._taken.groups]
        return {
            "rollout/age": sum(ages) / len(ages),
            "rollout/age_max": float(max(ages)),
            "waiting/training": self._taken.waited,
            "waiting/drawing": self._drawing_waited,
        }

    def wait(self) -> None:
        """Begin no more groups until the next step, and wait until nothing is drawn any more: before anything else uses
        the engine."""
        with self._changed:
            self._pauses = True
            while self._drawing or self._is_changing or (self._schedule is not None and self._waiting):
                self._raise_problem()
                self._wait_or_draw()
            self._raise_problem()

    def note_unused(self, events: RolloutEvents, reason: str) -> None:
        """Note what is drawn, or was to be drawn, and not trained on, at the end of a run. A collective."""
        with self._changed:
            self._pauses = True
            events.unused_groups(self._step, self._pending(), reason)

    def state_dict(self) -> dict[str, Any]:
        """Return what no step has trained on of all ranks, once the groups that are begun have ended: how many
        positions were admitted, of groups the rollouts, and the positions that are still to be drawn. A collective."""
        self.wait()
        drawn = [
            {"position": group.position, "version": group.version, "rollout": saved_rollouts([_rollout(group)])[0]}
            for group in self._ended
        ]
        waiting = [group.position for group in self._waiting]
        drawn_of_ranks, waiting_of_ranks = zip(*gathered((drawn, waiting)), strict=True)
        return {
            "admitted": self._admitted * self._ranks,
            "drawn_of_ranks": list(drawn_of_ranks),
            "waiting_of_ranks": list(waiting_of_ranks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of ranks. What a run that is shorter by now does not
        take is left at its end, and noted."""
        drawn, waiting = state["drawn_of_ranks"], state["waiting_of_ranks"]
        if len(drawn) == self._ranks:
            own_drawn, own_waiting = drawn[self._rank], waiting[self._rank]
        else:  # dealt anew, so that the ranks have equally many of each age
            every = sorted(
                (each for own in drawn for each in own), key=lambda each: (each["version"], each["position"])
            )
            left = sorted(position for own in waiting for position in own)
            own_drawn = every[self._rank :: self._ranks]
            own_waiting = left[(self._rank - len(every)) % self._ranks :: self._ranks]
        device = self._lender.engine.ranks.device
        self._admitted = int(state["admitted"]) // self._ranks
        self._waiting = [_Group(position, self._ask(position)) for position in own_waiting]
        self._ended = [
            _Group(
                each["position"],
                self._ask(each["position"]),
                int(each["version"]),
                rollout=loaded_rollout(each["rollout"], device),
                times=[],
            )
            for each in own_drawn
        ]

    def _drawn_as(self, kept: KeptModel) -> list[PreTrainedModel]:
        """Return the models as which groups are drawn at a time; an engine that holds weights reads none of theirs."""
        if self._held is not None:
            return [kept.model] * GROUPS_ELSEWHERE
        return [
            empty_copy(self._lender.model, self._lender.engine)
            for _ in range(GROUPS_AT_ONCE if self._in_background else 1)
        ]

    # Under the lock.

    def _hold(self, version: int, kept: KeptModel) -> None:
        """Have an engine with weights of its own take these, in a thread."""
        if self._held is None:
            return
        self._held.give(version, kept)
        if self._held.is_behind and not self._is_changing:
            self._is_changing = True
            threading.Thread(target=self._change, name="threestep weights ahead", daemon=True).start()

    def _may_change(self) -> bool:
        """Return whether nothing is drawn by the weights that are held, nor is to be by the schedule."""
        assert self._held is not None
        to_draw = self._schedule is not None and any(group.version == self._held.version for group in self._waiting)
        return not (self._drawing or to_draw)

    def _admit(self, step: int, kept: KeptModel) -> None:
        """Let the groups be begun that `step` allows; by a schedule, those that these weights draw."""
        if self._schedule is not None:
            positions: Iterable[int] = self._schedule.begun_by(step - 1, self._rank, self._ranks)
            self._waiting += [_Group(position, self._ask(position), step - 1, kept) for position in positions]
            return
        until = self.admission.admitted(step)
        positions = (place * self._ranks + self._rank for place in range(self._admitted, until))
        self._waiting += [_Group(position, self._ask(position)) for position in positions]
        self._admitted = max(until, self._admitted)

    def _hire(self) -> None:
        """Have a thread draw for each group that may be begun, as far as there are copies of the model."""
        for _ in range(0 if not self._in_background else min(len(self._copies), len(self._waiting))):
            # It does not keep the program alive: a run that ends does not wait for responses that nobody learns from.
            arguments = (self._copies.pop(),)
            threading.Thread(target=self._work, args=arguments, name="threestep rollouts ahead", daemon=True).start()

    def _begun(self) -> _Group | None:
        """Return the next group that may be begun; None if there is none."""
        for group in self._waiting:
            is_free = group.kept is None and not self._pauses
            if is_free and self._newest is not None and self._holds(self._newest[0]):
                group.version, group.kept = self._newest
            if group.kept is not None and self._holds(group.version) and self._problem is None:
                self._waiting.remove(group)
                self._drawing.append(group)
                self._idle_seconds, self._idle_since = self._idle(), None
                return group
        return None

    def _holds(self, version: int | None) -> bool:
        return self._held is None or self._held.version == version

    def _idle(self) -> float:
        """Return seconds since the last step was begun in which nothing was drawn."""
        return self._idle_seconds + (0.0 if self._idle_since is None else time.monotonic() - self._idle_since)

    def _wait_or_draw(self) -> None:
        """Wait for a group that ends; without threads, draw one."""
        if self._in_background:
            self._changed.wait()
            return
        group = self._begun()
        assert group is not None, "a step takes groups that it may begin"
        self._draw(group, self._copies[0])

    def _batch(self, step: int) -> list[_Group] | None:
        """Return the groups that `step` takes, in the order of their positions; None while they are drawn."""
        if self._schedule is not None:
            wanted = self._schedule.batches[step - 1][self._rank :: self._ranks]
            found = {group.position: group for group in self._ended}
            return [found[position] for position in wanted] if found.keys() >= set(wanted) else None
        ended = [group.version or 0 for group in self._ended]
        others = [group.version or 0 for group in self._drawing] + [step - 1] * len(self._waiting)
        places = self.admission.taken(step, ended, others)
        if places is None:
            return None
        return sorted((self._ended[place] for place in places), key=lambda group: group.position)

    def _rollouts_of(self, step: int, groups: Sequence[_Group], waited: float) -> RolloutsOfStep:
        """Return the groups as rollouts of equally many prompts. ThreestepError for other rows than the schedule's."""
        prompts, rollouts, size = [], [], len(groups) // self._batches
        for first in range(0, len(groups), size):
            own = groups[first : first + size]
            rows = [row for group in own for part in group.asked.prompts for row in part.rows]
            self._check_rows([group.position for group in own], [row.row_id for row in rows])
            pad = own[0].asked.requests[0].sampling.pad_token_id
            parts = [_rollout(group) for group in own]
            every_B = torch.arange(sum(len(part.response_lengths_B) for part in parts), device=parts[0].ended_B.device)
            prompts.append(collate_prompts(rows, pad))
            rollouts.append(joined_rollouts(parts, every_B, pad))
        versions = [(group.position, group.version or 0) for group in groups]
        oldest = min(version for _, version in versions)
        pending, shares = self._pending(), joined_shares(group.shares for group in groups)
        return RolloutsOfStep(step, oldest, prompts, rollouts, waited, _times(groups), versions, pending, shares)

    def _check_rows(self, positions: Sequence[int], row_ids: Sequence[int]) -> None:
        if self._schedule is None:
            return
        for position, row_id in zip(positions, row_ids, strict=True):
            if self._schedule.rows[position] != row_id:
                raise ThreestepError(
                    "--replay_schedule needs the data and the seed of the run that wrote it, which had row "
                    f"{self._schedule.rows[position]:,} at position {position:,}, but this run has row {row_id:,} "
                    "there; use the data and the --seed of that run"
                )

    def _pending(self) -> list[int]:
        """Return the positions that are admitted and not taken."""
        if self._schedule is not None:
            until = self.admission.admitted(self._step) * self._ranks
            return self._schedule.untrained(self._step, until)[self._rank :: self._ranks]
        return [group.position for group in (*self._waiting, *self._drawing, *self._ended)]

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    # In the threads.

    def _work(self, plain: PreTrainedModel) -> None:
        """Draw group after group as this copy of the model, as long as one may be begun."""
        while True:
            with self._changed:
                group = self._begun()
                if group is None:
                    self._copies.append(plain)
                    return
            self._draw(group, plain)

    def _change(self) -> None:
        """Have the engine take newer weights whenever it may, until it has the newest."""
        held = self._held
        assert held is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._problem is not None or self._may_change())
                going = self._problem is None
            try:
                version = held.change() if going else None
            except BaseException as problem:  # noqa: BLE001 - the loop raises it
                self._problem, version = problem, None
            with self._changed:
                if version is not None:
                    held.changed(version)
                    self._hire()
                self._is_changing = version is not None and held.is_behind
                self._changed.notify_all()
                if not self._is_changing:
                    return

    def _lent(self, kept: KeptModel, plain: PreTrainedModel) -> AbstractContextManager[PreTrainedModel]:
        return nullcontext(plain) if self._held is not None else self._engine.lent(kept.lent_as(plain))

    @torch.no_grad()
    def _draw(self, group: _Group, plain: PreTrainedModel) -> None:
        assert group.kept is not None
        [request] = group.asked.requests
        group.times.append(time.time())
        try:
            with self._lent(group.kept, plain) as model:
                group.rollout = rolled_out(self._engine, model, request)
                group.shares = self._engine.shares()
        except BaseException as problem:  # noqa: BLE001 - the loop raises it
            self._problem = problem
        group.times.append(time.time())
        group.kept = None  # weights are freed with the last group that they draw
        with self._changed:
            self._drawing.remove(group)
            if group.rollout is not None:
                self._ended.append(group)
            self._idle_since = None if self._drawing else time.monotonic()
            self._changed.notify_all()


def _rollout(group: _Group) -> Rollout:
    assert group.rollout is not None, "it has ended"
    return group.rollout


def _times(groups: Sequence[_Group]) -> Times | None:
    """Return when the first was asked for and begun, and when the last ended; None where a checkpoint had all."""
    times = [group.times for group in groups if group.times]
    if not times:
        return None
    asked, began, ended = zip(*times, strict=True)
    return Times(min(asked), min(began), max(ended))
