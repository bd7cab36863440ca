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
        "With --rollout_engine hf: guess this many tokens ahead and verify them in one forward; auto guesses one "
        "token where that is faster, and 0 turns guessing off. The responses do not change.",
        "tokens",
    )
    speculate_by: str | None = flag(
        None,
        "How --speculate guesses: head uses the head from --mtp_num_layers; ngram looks for the last tokens earlier "
        "in the prompt or its responses and proposes what followed, without a head; auto uses the head if there is "
        "one.",
        choices=GUESSERS,
        takes_auto=True,
    )
