"""The flags of how long a conversation may become. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class ConversationArguments:
    """Limits of conversations with an environment; what each of them ended is counted (README.md)."""

    topic: ClassVar[str] = "environment"

    max_turns: int = flag(8, "Maximum model turns per conversation; the last one is not answered.", "number >= 1")
    max_tool_calls: int | None = flag(
        None,
        "Maximum tool calls per conversation; a further call is not run, and ends the conversation. Default: no limit.",
        "number >= 0",
    )
    max_observation_tokens: int | None = flag(
        None,
        "Maximum length of one environment message; the middle of a longer one is cut out. Default: only "
        "--max_observation_characters.",
        "tokens >= 8",
    )
    max_conversation_seconds: float | None = flag(
        None,
        "Time after which a conversation starts no new turn. Runs with this limit are not reproducible. Default: no "
        "limit.",
        "seconds > 0",
    )
    answer_interval: int = flag(
        32,
        "Environment answers join the batch every N generated tokens, and the batch waits for late ones, so rollouts "
        "are bit-exact however long answers take. 0 takes each answer when it arrives: faster if a few take much "
        "longer than the rest, but not bit-exact.",
        "tokens >= 0",
    )

    def require_partner(self, acts: bool, mistakes: Mistakes) -> None:
        """Note limits of conversations that there are not. acts: somebody answers the model."""
        for name in ("max_tool_calls", "max_observation_tokens", "max_conversation_seconds"):
            mistakes.require(
                acts or getattr(self, name) is None,
                f"--{name} {getattr(self, name)} limits conversations, but this run has none; pass --environment or "
                f"--tools, or remove --{name}",
            )
