"""The flags of drawing from a finished model. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.engine.config.arguments import DTYPE_NAMES, EngineArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.table import ENGINES_HELP


@dataclass
class SamplingArguments:
    """Sampling of answers, with the defaults of step 3's rollouts."""

    topic: ClassVar[str] = "rollout"

    max_new_tokens: int = flag(256, "Maximum length of a response.", "tokens >= 1", aliases=["--max_answer_seq_len"])
    temperature: float = flag(1.0, "Sampling temperature; 0 always picks the most likely token.", "temperature >= 0")
    top_k: int = flag(0, "Sample from the k most likely tokens; 0 samples from all.", "tokens >= 0")
    top_p: float = flag(
        1.0, "Sample from the most likely tokens with this total probability; 1 samples from all.", "0 < share <= 1"
    )
    min_p: float = flag(
        0.0,
        "Sample from tokens with at least this share of the top token's probability; 0 samples from all.",
        "0 <= share <= 1",
    )
    rollout_engine: str = flag("hf", f"Generation engine: {ENGINES_HELP}.", "name")
    dtype: str | None = flag_of(
        EngineArguments,
        f"Precision: one of {', '.join(DTYPE_NAMES)}; default: that of the saved weights.",
        default=None,
        topic="rollout",
    )


@dataclass
class PromptSamplesArguments:
    """Responses to each prompt."""

    num_samples_per_prompt: int = flag(1, "Responses per prompt.", "responses >= 1", topic="batch")


@dataclass
class EvaluationArguments:
    """Answers to held-out prompts."""

    val_samples: int = flag(
        1,
        "Responses per prompt; above 1, also report deviation, best (pass@k for 0 and 1), worst and majority of k.",
        "responses >= 1",
        topic="evaluation",
    )
