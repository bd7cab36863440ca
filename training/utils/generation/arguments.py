"""The flags of drawing from a finished model. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.engine.config.arguments import DTYPE_NAMES, EngineArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.table import ENGINES_HELP

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

DEFAULT_PATHS = 2  # of a block, as in Parallel-R1
PATH_FLAGS = ("parallel_paths", "max_path_tokens")


@dataclass
class SamplingArguments:
    """Sampling of answers; the defaults are those of step 3's rollouts."""

    topic: ClassVar[str] = "rollout"

    max_new_tokens: int = flag(256, "Maximum length of an answer.", "tokens >= 1", aliases=["--max_answer_seq_len"])
    temperature: float = flag(1.0, "Sampling temperature; 0 always picks the most likely token.", "temperature >= 0")
    top_k: int = flag(0, "Draw from the k most likely tokens; 0 draws from all.", "tokens >= 0")
    top_p: float = flag(
        1.0, "Draw from the most likely tokens with this total probability; 1 draws from all.", "0 < share <= 1"
    )
    min_p: float = flag(
        0.0,
        "Draw from tokens with at least this share of the top token's probability; 0 draws from all.",
        "0 <= share <= 1",
    )
    parallel_paths: int | None = flag(
        None,
        f"With --parallel_thinking: paths of each block that an answer opens; default: {DEFAULT_PATHS}.",
        "paths >= 1",
    )
    max_path_tokens: int | None = flag(
        None,
        "With --parallel_thinking: maximum length of a path, its tags included; default: what is left of "
        "--max_new_tokens, which counts only the longest path of each block.",
        "tokens >= 2",
        topic="length",
    )
    rollout_engine: str = flag("hf", f"What draws: {ENGINES_HELP}.", "name")
    dtype: str | None = flag_of(
        EngineArguments,
        f"One of {', '.join(DTYPE_NAMES)}; default: the dtype of the saved weights.",
        default=None,
        topic="rollout",
    )

    @property
    def paths_of_a_block(self) -> int:
        """With --parallel_thinking."""
        return DEFAULT_PATHS if self.parallel_paths is None else self.parallel_paths


@dataclass
class PromptSamplesArguments:
    """Responses to each prompt."""

    num_samples_per_prompt: int = flag(1, "Responses drawn for each prompt.", "responses >= 1", topic="batch")


@dataclass
class EvaluationArguments:
    """Answers to held-out prompts."""

    val_samples: int = flag(
        1,
        "Answers to each prompt; above 1 also the deviation, best (of 0 and 1: pass@k), worst and majority of k.",
        "responses >= 1",
        topic="evaluation",
    )


def check_path_flags(flags: Any, thinks: bool, mistakes: Mistakes) -> None:
    """Note each of PATH_FLAGS that `flags` has, where nothing draws paths."""
    for name in PATH_FLAGS:
        value = getattr(flags, name)
        mistakes.require(
            thinks or value is None,
            f"--{name} {value} is of the paths of --parallel_thinking, which is not given; give it, or leave --{name} "
            "out",
        )
