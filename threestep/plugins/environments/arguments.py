"""The flags of environments and tools. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.environments.addresses import check_environment, name_of
from threestep.plugins.environments.calling.parsers import PARSERS
from threestep.plugins.environments.calling.python_tool import IN_BUBBLEWRAP, NO_SANDBOX
from training.utils.base.user_files import check_address, is_address
from training.utils.flags.flags import AUTO, flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

TOOLS = "tools"  # the environment that --tools makes


@dataclass
class EnvironmentArguments:
    """Environments and tools that answer the model, and their limits (README.md)."""

    topic: ClassVar[str] = "environment"

    environment: str | None = flag(
        None,
        "Class that answers the model turn by turn: FILE.py:NAME, an installed name or verifiers:NAME. Separate "
        "several with commas; each handles the rows whose column 'environment' names it.",
        "names",
    )
    tools: str | None = flag(
        None,
        "Typed Python functions with docstrings that the model may call, as FILE.py:NAME,FILE.py:NAME. "
        f"{IN_BUBBLEWRAP} runs the model's Python programs in bubblewrap; {NO_SANDBOX} runs them with the best "
        "isolation available without it.",
        "names",
    )
    tool_parser: str = flag(
        AUTO,
        f"Format of the model's tool calls: {', '.join(PARSERS)}, your own function as FILE.py:NAME, or 'auto', "
        "which follows the chat template.",
        "name",
    )
    tool_seconds: float = flag(10.0, "Time limit per tool call; a slower call returns an error.", "seconds > 0")
    environment_seconds: float = flag(
        60.0, "Time limit per environment step; a slower step ends the conversation.", "seconds > 0"
    )
    max_observation_characters: int = flag(
        4096,
        "Maximum length of a tool's answer or an environment's message; the middle of a longer one is cut out.",
        "characters >= 100",
    )
    max_calls_per_turn: int = flag(
        8, "Maximum tool calls run per message; further calls return an error.", "number >= 1"
    )

    @property
    def environment_addresses(self) -> list[str]:
        """FILE.py:NAME of each environment."""
        return _addresses(self.environment)

    @property
    def tool_addresses(self) -> list[str]:
        """FILE.py:NAME of each tool."""
        return _addresses(self.tools)

    @property
    def is_on(self) -> bool:
        """True if an environment or tool answers the model."""
        return bool(self.environment_addresses or self.tool_addresses)

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings. Runs none of the files."""
        for address in self.environment_addresses:
            mistakes.note(check_environment, address)
        for address in self.tool_addresses:
            if address not in (NO_SANDBOX, IN_BUBBLEWRAP):
                mistakes.note(check_address, address, "--tools")
        for name, addresses in (("--environment", self.environment_addresses), ("--tools", self.tool_addresses)):
            names = list(map(name_of, addresses))
            mistakes.require(
                len(set(names)) == len(names), f"{name} expects different names, got {', '.join(names)}; rename one"
            )
        mistakes.require(
            TOOLS not in map(name_of, self.environment_addresses),
            f"--environment expects a class with a name other than {TOOLS}, which is reserved for --tools; rename it",
        )
        if is_address(self.tool_parser):
            mistakes.note(check_address, self.tool_parser, "--tool_parser")
        else:
            mistakes.require_one_of("--tool_parser", self.tool_parser, (AUTO, *PARSERS))


@dataclass
class OpeningRowArguments:
    """The row that opens an environment outside of training."""

    topic: ClassVar[str] = "environment"

    row: str | None = flag(None, "Columns of the row that opens --environment, as a JSON object.", "json")


def _addresses(given: str | None) -> list[str]:
    return [address.strip() for address in (given or "").split(",") if address.strip()]
