"""Users' environments and tools (`--environment`, `--tools`): checked at the start, made for each conversation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from threestep.plugins.environments.addresses import load_environment, name_of
from threestep.plugins.environments.arguments import TOOLS, EnvironmentArguments
from threestep.plugins.environments.calling.calls import Caller
from threestep.plugins.environments.calling.python_tool import IN_BUBBLEWRAP, NO_SANDBOX, isolation_of, python_tool
from threestep.plugins.environments.calling.schemas import schema_of
from threestep.plugins.environments.calling.tool_environment import CallLimits, Tool, ToolEnvironment
from threestep.plugins.environments.episodes import Episode, EpisodeSettings, takes_seed
from threestep.plugins.environments.interface import AssistantMessage
from training.utils.base.console import log, note
from training.utils.base.errors import Mistakes, ThreestepError, first_line, nearest_names
from training.utils.base.user_files import load_function

COLUMN = "environment"  # of a row: its environment


class Environments:
    """The environments of a run by name."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]], flags: EnvironmentArguments, caller: Caller) -> None:
        self._caller = caller
        self._warned = False
        self._settings = {
            name: EpisodeSettings(
                name=name,
                make=make,
                seconds=None if name == TOOLS else flags.environment_seconds,
                characters=flags.max_observation_characters,
                warn=self._warn,
            )
            for name, make in makers.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._settings)

    @property
    def answers_any_row(self) -> bool:
        """True if no column of a row matters: there are only tools."""
        return self.names == (TOOLS,)

    def name_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the environment of a row: that of its column `environment`, or the run's only one where the row has no
        such column or there are only tools. None: nobody answers, the row is a plain prompt.

        Raises ThreestepError for an unknown name, and where several environments leave it open.
        """
        if self.answers_any_row or (COLUMN not in row and len(self.names) == 1):
            return self.names[0]
        name = row.get(COLUMN, self)
        if name is None or name == "":
            return None
        if name not in self.names:
            got = f"got '{name}'{nearest_names(str(name), self.names)}" if COLUMN in row else "got a row without it"
            raise ThreestepError(
                f"the column '{COLUMN}' expects one of {', '.join(self.names)}, or nothing for a single-turn row, "
                f"{got}; fix the row with the prompt {str(row.get('prompt'))[:60]!r}"
            )
        return str(name)

    def episode(self, row: Mapping[str, Any], seed: int, warn: Callable[[str], None] | None = None) -> Episode | None:
        """Return a row's conversation with its environment, not begun yet; None where nobody answers. row: is copied,
        as others converse about it too. seed: of this sample. warn: is called with the sentence of each failure; by
        default the first of the run is logged."""
        name = self.name_of(row)
        if name is None:
            return None
        settings = self._settings[name] if warn is None else replace(self._settings[name], warn=warn)
        return Episode(settings, deepcopy(row), seed, self._caller)

    def close(self) -> None:
        """Release the resources of calls; nothing waits for calls that hang."""
        self._caller.close()

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            log(f"warning: {sentence}. Further failures are counted as environment_failures, but not logged.")


def load_environments(flags: EnvironmentArguments, mistakes: Mistakes) -> Environments | None:
    """Return the environments of --environment and --tools; None without these flags, and where they are mistaken,
    which is added to `mistakes`. Runs the users' files, and makes each environment once to look at it."""
    caller = Caller()
    makers: dict[str, Callable[[], Any]] = {}
    for address in flags.environment_addresses:
        maker = mistakes.note(_checked_maker, address, flags.environment_seconds, caller)
        if maker is not None:
            makers[name_of(address)] = maker
    tools = [mistakes.note(_tool, address, flags.tool_seconds) for address in flags.tool_addresses]
    usable = [tool for tool in tools if tool is not None]
    if usable:
        limits = CallLimits(flags.tool_seconds, flags.max_observation_characters, flags.max_calls_per_turn)
        makers[TOOLS] = lambda: ToolEnvironment(usable, limits, caller)
    names = [tool.name for tool in usable]
    mistakes.require(
        len(set(names)) == len(names),
        f"--tools expects functions with different names, got {', '.join(names)}; rename one",
    )
    return Environments(makers, flags, caller) if makers and not mistakes.sentences else None


def _tool(address: str, seconds: float) -> Tool:
    if address in (NO_SANDBOX, IN_BUBBLEWRAP):
        isolation = isolation_of(address)
        note(f"--tools {address} runs the model's programs in {isolation.name}: {isolation.sentence}")
        function = python_tool(seconds, isolation)
    else:
        function = load_function(address, "--tools")
    return Tool(function, schema_of(function, "--tools"))


def _checked_maker(address: str, seconds: float, caller: Caller) -> Callable[[], Any]:
    """The class of --environment, of which one was made and has the three methods."""
    maker = load_environment(address)
    outcome = caller.wait(caller.start(maker), seconds)
    if outcome.problem is not None:
        raise ThreestepError(
            f"--environment expects a class that can be created without arguments, got '{address}': "
            f"{type(outcome.problem).__name__}: {first_line(outcome.problem)}"
        )
    if outcome.is_slow:
        raise ThreestepError(f"--environment {address} was not created within --environment_seconds {seconds:g}")
    made = outcome.value
    arguments: dict[str, tuple[Any, ...]] = {"reset": ({},), "step": (AssistantMessage("", ""),), "close": ()}
    for name, given in arguments.items():
        method = getattr(made, name, None)
        if not callable(method):
            raise ThreestepError(
                f"--environment expects a class with reset(row), step(message) and close(), got '{address}', which has "
                f"no {name}"
            )
        named = {"seed": 0} if name == "reset" and takes_seed(method) else {}
        try:
            inspect.signature(method).bind(*given, **named)
        except TypeError as problem:
            raise ThreestepError(
                f"--environment expects reset(row) or reset(row, seed), step(message) and close(), got {name}"
                f"{inspect.signature(method)} in '{address}': {problem}"
            ) from problem
    caller.start(made.close)
    return maker
