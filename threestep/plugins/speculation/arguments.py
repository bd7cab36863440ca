"""Flags of rollouts by guesses. Cheap to import: `--help` loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag

# A head that is trained beside the model, or what followed the same tokens before (`ngrams`).
GUESSERS = BY_HEAD, BY_NGRAMS = "head", "ngram"


@dataclass
class SpeculationArguments:
    """Guesses, and what they go by."""

    topic: ClassVar[str] = "rollout"

    speculate: str = flag(
        "0",
        "With --rollout_engine hf: guess so many tokens ahead and verify them in one forward, or auto: one token, "
        "wherever that is faster. The responses stay the same. 0 guesses none.",
        "tokens",
    )
    speculate_by: str | None = flag(
        None,
        "What --speculate guesses by: head, that of --mtp_num_layers; ngram, what followed the last tokens where they "
        "were in the prompt or its responses before, which needs no head; auto: the head where there is one.",
        choices=GUESSERS,
        takes_auto=True,
    )
