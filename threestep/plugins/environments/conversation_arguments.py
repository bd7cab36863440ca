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

    max_turns: int = flag(
        8, "Turns that the model may take in a conversation; the last is not answered.", "number >= 1"
    )
    max_tool_calls: int | None = flag(
        None,
        "Calls that a conversation may make; the one beyond is not run, and ends it. Default: no limit.",
        "number >= 0",
    )
    max_observation_tokens: int | None = flag(
        None,
        "Length of one message of an environment; the middle of a longer one is left out. Default: no limit but "
        "--max_observation_characters.",
        "tokens >= 8",
    )
    max_conversation_seconds: float | None = flag(
        None,
        "Time after which a conversation begins no further turn. Runs with it are not repeatable. Default: no limit.",
        "seconds > 0",
    )
    answer_interval: int = flag(
        32,
        "Answers of environments join the batch every so many drawn tokens, by which time late ones are waited for: a "
        "rollout repeats to the bit, however long answers take. 0 takes each answer as it comes, sooner where a few "
        "take much longer than others; such rollouts do not repeat to the bit.",
        "tokens >= 0",
    )

    def require_partner(self, acts: bool, mistakes: Mistakes) -> None:
        """Note limits of conversations that there are not. acts: somebody answers the model."""
        for name in ("max_tool_calls", "max_observation_tokens", "max_conversation_seconds"):
            mistakes.require(
                acts or getattr(self, name) is None,
                f"--{name} {getattr(self, name)} limits conversations, and there are none; give --environment or "
                "--tools, or leave it out",
            )
