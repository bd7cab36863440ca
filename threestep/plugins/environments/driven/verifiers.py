"""Environments of verifiers 0.4, unmodified: they drive the model, and their rewards are the conversation's.

Serves `--environment verifiers:NAME`, which loads it by its name. Each conversation is an episode of theirs: their
agent asks their server, which asks our endpoint, and a rollout draws the answer. A row names its task by its column
`task`.
"""

from __future__ import annotations

import asyncio
import importlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from threestep.plugins.environments.driven.driven import Driven, DrivenEnvironment
from threestep.plugins.environments.driven.verifiers_tasks import TASK_COLUMN, open_verifiers, tasks_of
from training.utils.base.errors import ThreestepError

_NO_KEY = "THREESTEP_NO_API_KEY"  # a variable that nobody sets: the address is the key
_MODEL = "policy"


def environment_of(name: str) -> Callable[[], VerifiersEnvironment]:
    """Return what makes a conversation of an environment. ThreestepError where it does not load."""
    served = Served(open_verifiers(name, "--environment"))
    return lambda: VerifiersEnvironment(served)


class Served:
    """An environment and its servers, which every event loop starts for itself and ends where it ends."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.tasks = tasks_of(environment)
        self._serving: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, asyncio.Future[None]]] = (
            weakref.WeakKeyDictionary()
        )

    async def start(self) -> None:
        """Start the servers, unless they run."""
        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            ready = loop.create_future()
            self._serving[loop] = loop.create_task(self._serve(ready)), ready
        await asyncio.shield(self._serving[loop][1])

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.environment.serving():
                ready.set_result(None)
                await asyncio.get_running_loop().create_future()  # until the loop ends, and cancels it
        except Exception as problem:  # noqa: BLE001 - whatever it is, it is that of all conversations
            if not ready.done():
                ready.set_exception(problem)


class VerifiersEnvironment(DrivenEnvironment):
    """One episode."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._served = served

    async def run(self, row: Mapping[str, Any], base_url: str) -> Driven:
        clients = importlib.import_module("verifiers.v1.clients")
        task = self._task(row)
        await self._served.start()
        context = clients.ModelContext(_MODEL, clients.EvalClientConfig(base_url=base_url, api_key_var=_NO_KEY))
        episode = await self._served.environment.run_episode(task, context)
        errors = [error for each in (episode, *episode.traces) for error in each.errors]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        return Driven(sum(trace.reward for trace in episode.traces), figures_of(episode))

    def _task(self, row: Mapping[str, Any]) -> Any:
        place, tasks = row.get(TASK_COLUMN), self._served.tasks
        if not isinstance(place, int) or not 0 <= place < len(tasks):
            raise ThreestepError(
                f"a row of a verifiers environment needs a task from 0 to {len(tasks) - 1} in its column "
                f"'{TASK_COLUMN}', got {place!r}; take its rows from --data_path verifiers:NAME"
            )
        return tasks[place]


def figures_of(episode: Any) -> dict[str, float]:
    """The rewards of an episode before their weights, and its metrics, by name."""
    figures: dict[str, float] = {}
    for trace in episode.traces:
        figures |= {name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None}
        figures |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return figures
