"""The flags of --rollout_engine hf. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag

PREFILL_TOKENS = 4096


@dataclass
class HfArguments:
    """Used only by --rollout_engine hf."""

    topic: ClassVar[str] = "rollout"

    prefill_tokens: int = flag(
        PREFILL_TOKENS,
        "A longer prompt is read in parts of so many tokens, whose masks take less memory; it rounds differently.",
        "tokens >= 1",
    )
