"""The queue of rollouts that are drawn ahead of training, in strict order.

The rollouts of step s are drawn by the weights of step s - 1 - K, exactly: those after so many steps, or the first ones
(step s itself makes the weights of step s). Which weights draw, which prompts and which seeds are functions of the step
alone, so that no timing decides anything: a run whose rollouts are late waits for them. K is --rollouts_ahead.

    K = 1:   step 1 is drawn by the weights 0, then
             step 1 trains 0 -> 1 | step 2 is drawn by 0
             step 2 trains 1 -> 2 | step 3 is drawn by 1

Knows neither prompts nor losses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.ahead.kept_model import kept_model
from threestep.plugins.ahead.saved import rollouts_of, saved_rollouts
from training.step3_ppo.contracts.rollouts import Asked, RolloutQueue, RolloutsOfStep, Times
from training.utils.contracts.rollout_engine import rolled_out
from training.utils.engine.ranks.collectives import gathered

if TYPE_CHECKING:
    from training.step3_ppo.contracts.rollouts import RolloutEvents
    from training.utils.contracts.lending import Lender
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, ServerShare
    from training.utils.data.rows.documents import PromptBatch
    from training.utils.engine.whole_model import WholeModel

    # Rollouts, and what each server drew of them.
    _Drawn = tuple[Sequence[Rollout], dict[str, ServerShare]]


class _Draw:
    """A step's rollouts that are being drawn, each draw behind the one before it."""

    def __init__(
        self,
        step: int,
        version: int,
        prompts: Sequence[PromptBatch],
        draw: Callable[[], _Drawn],
        *,
        behind: _Draw | None,
        in_background: bool,
    ) -> None:
        self.step, self.version, self.prompts = step, version, prompts
        self._behind = behind
        self._draw: Callable[[], _Drawn] | None = draw
        self._drawn: _Drawn = (), {}
        self._problem: BaseException | None = None
        self._asked = self._began = self._ended = time.time()
        # It does not keep the program alive: a run that ends does not wait for responses that nobody learns from.
        self._thread = threading.Thread(target=self._run, name="threestep rollouts ahead", daemon=True)
        if in_background:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        if self._behind is not None:
            self._behind.wait()
        self._behind, draw, self._draw = None, self._draw, None  # weights are freed with what draws by them
        self._began = time.time()
        try:
            assert draw is not None
            self._drawn = draw()
        except BaseException as problem:  # noqa: BLE001 - the loop raises it
            self._problem = problem
        self._ended = time.time()

    def wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> RolloutsOfStep:
        """Wait, and return the rollouts; raises what drawing them raised."""
        started = time.monotonic()
        self.wait()
        if self._problem is not None:
            raise self._problem
        times, (rollouts, shares) = Times(self._asked, self._began, self._ended), self._drawn
        waited = time.monotonic() - started
        return RolloutsOfStep(self.step, self.version, self.prompts, rollouts, waited, times, shares=shares)


class RolloutsAhead(RolloutQueue):
    """Draws the rollouts of every step up to `ahead` steps after the one that is trained.

    lender: the trained model. ask: what to ask for in a step, the same whenever it is called.
    in_background: False draws before the step in place of beside it: the same rollouts, for engines that gain nothing.
    """

    state_name = "rollouts_ahead"

    def __init__(
        self,
        ahead: int,
        engine: RolloutEngine,
        lender: WholeModel,
        ask: Callable[[int], Asked],
        *,
        last_step: int,
        in_background: bool = True,
    ) -> None:
        self.ahead = ahead
        self._engine, self._lender, self._ask = engine, lender, ask
        self._last_step, self._in_background = last_step, in_background
        self._pending: deque[_Draw | RolloutsOfStep] = deque()
        self._taken: RolloutsOfStep | None = None
        self._drawing_waited = 0.0
        self._idle_since: float | None = None  # when the last draw that was taken had ended

    def take(self, step: int) -> RolloutsOfStep:
        """Wait for the rollouts of `step`, which trains next, and begin those that its weights draw. A collective."""
        if not self._pending:  # at the start of a run, or of what lengthens one
            self._begin(step - 1, range(step, step + 1))
        drawn = _drawn(self._pending.popleft())
        assert drawn.step == step, f"step {step} takes the rollouts of step {drawn.step}"
        assert 0 <= step - 1 - drawn.version <= self.ahead, "no token is older than the flag says"
        self._note(drawn)
        begun = self._pending[-1].step if self._pending else step
        self._begin(step - 1, range(begun + 1, min(step + self.ahead, self._last_step) + 1))
        return drawn

    def _begin(self, version: int, steps: range) -> None:
        """Begin to draw the rollouts of these steps, by the weights as they are now. version: steps that they have
        taken."""
        if not steps:
            return
        kept = kept_model(self._lender)
        for step in steps:
            asked = self._ask(step)
            behind = self._pending[-1] if self._pending else None
            self._pending.append(
                _Draw(
                    step,
                    version,
                    asked.prompts,
                    partial(self._drawn_by, kept, asked.requests),
                    behind=behind if isinstance(behind, _Draw) else None,
                    in_background=self._in_background,
                )
            )

    @torch.no_grad()
    def _drawn_by(self, kept: Lender, requests: Sequence[RolloutRequest]) -> _Drawn:
        with self._engine.lent(kept) as model:
            return [rolled_out(self._engine, model, request) for request in requests], self._engine.shares()

    def _note(self, drawn: RolloutsOfStep) -> None:
        self._taken, self._drawing_waited = drawn, 0.0
        if drawn.times is not None:
            if self._idle_since is not None:
                self._drawing_waited = max(drawn.times.began - self._idle_since, 0.0)
            self._idle_since = drawn.times.ended

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts taken last: the age of their weights, and who waited for whom, in seconds of this
        rank."""
        assert self._taken is not None
        return {
            "rollout/age": float(self._taken.step - 1 - self._taken.version),
            "waiting/training": self._taken.waited,
            "waiting/drawing": self._drawing_waited,
        }

    def wait(self) -> None:
        """Wait until nothing is drawn any more: before anything else uses the engine."""
        for draw in self._pending:
            if isinstance(draw, _Draw):
                draw.wait()

    def note_unused(self, events: RolloutEvents, reason: str) -> None:
        """Note what is drawn and not trained on, at the end of a run."""
        events.unused(self.pending(), reason)

    def pending(self) -> list[tuple[int, int]]:
        """Return step and version of what is drawn and not yet trained on."""
        return [(draw.step, draw.version) for draw in self._pending]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all ranks' rollouts that no step has trained on, once they are drawn. A collective."""
        every = [_drawn(draw) for draw in self._pending]
        ranks = gathered([saved_rollouts(drawn.rollouts) for drawn in every])
        return [
            {"step": drawn.step, "version": drawn.version, "rollouts_of_ranks": [own[place] for own in ranks]}
            for place, drawn in enumerate(every)
        ]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned, on any number of ranks. Steps beyond the last one are left out."""
        self._pending.clear()
        for saved in state:
            step = int(saved["step"])
            if step <= self._last_step:
                asked = self._ask(step)
                rollouts = rollouts_of(saved["rollouts_of_ranks"], asked.requests, self._lender.engine.ranks)
                self._pending.append(RolloutsOfStep(step, int(saved["version"]), asked.prompts, rollouts))


def _drawn(draw: _Draw | RolloutsOfStep) -> RolloutsOfStep:
    return draw.result() if isinstance(draw, _Draw) else draw
