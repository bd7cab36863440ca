"""Flags of a run with which environments and tools do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.conversation_arguments import ConversationArguments

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check_beside_environments(flags: Any, mistakes: Mistakes) -> None:
    """Note what they cannot go with. flags: a step's `OneModelFlags` or `PpoFlags`"""
    environment = flags.added.of(EnvironmentArguments)
    if not environment.is_on:
        return
    mistakes.require(
        flags.data.form is None,
        "--environment and --tools generate turn by turn, but --parallel_thinking generates paths in parallel; remove "
        "one of them",
    )
    turns, seconds = flags.added.of(ConversationArguments).max_turns, environment.environment_seconds
    longest = seconds * (turns + 1)
    mistakes.require(
        longest < flags.faults.rank_timeout,
        f"--environment_seconds {seconds:g} for the opening and each of --max_turns {turns} turns adds up to "
        f"{longest:g} seconds, but other ranks wait only for --rank_timeout {flags.faults.rank_timeout:g}; lower the "
        "first two or raise the last",
    )
