"""The flags of drawing from a finished model. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.engine.arguments import DTYPE_NAMES
from training.utils.generation.engines import ENGINES_HELP
from training.utils.run.flags import flag


@dataclass
class SamplingArguments:
    """How answers are drawn; the defaults are those of step 3's rollouts."""

    topic: ClassVar[str] = "rollout"

    max_new_tokens: int = flag(
        256, "Maximum length of an answer.", aliases=["--max_answer_seq_len"], least=1, unit="tokens"
    )
    temperature: float = flag(
        1.0, "Sampling temperature; 0 always picks the most likely token.", least=0, unit="temperature"
    )
    top_k: int = flag(0, "Draw from the k most likely tokens; 0 draws from all.", least=0, unit="tokens")
    top_p: float = flag(
        1.0,
        "Draw from the most likely tokens with this total probability; 1 draws from all.",
        above=0,
        most=1,
        unit="share",
    )
    min_p: float = flag(
        0.0,
        "Draw from tokens with at least this share of the top token's probability; 0 draws from all.",
        least=0,
        most=1,
        unit="share",
    )
    rollout_engine: str = flag("hf", f"What draws: {ENGINES_HELP}.", unit="name")
    dtype: str | None = flag(
        None, f"One of {', '.join(DTYPE_NAMES)}; default: the dtype of the saved weights.", choices=DTYPE_NAMES
    )
