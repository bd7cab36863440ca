"""The flags of whatever asks a finished model. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.step3_ppo.arguments import PpoArguments
from training.utils.engine.arguments import DTYPE_NAMES
from training.utils.run.errors import Mistakes

ENGINES = ("hf", "vllm")


@dataclass
class SamplingArguments:
    """How answers are drawn; the defaults are those of step 3's rollouts."""

    max_new_tokens: int = field(
        default=PpoArguments.max_answer_seq_len,
        metadata={"help": "Most tokens of an answer.", "aliases": ["--max_answer_seq_len"]},
    )
    temperature: float = field(
        default=PpoArguments.temperature, metadata={"help": "0 takes the likeliest token each time."}
    )
    top_k: int = field(default=PpoArguments.top_k, metadata={"help": "Draw from the k likeliest tokens; 0 from all."})
    top_p: float = field(
        default=PpoArguments.top_p, metadata={"help": "Draw from the likeliest tokens of this mass; 1 from all."}
    )
    min_p: float = field(
        default=PpoArguments.min_p,
        metadata={"help": "Draw from tokens of at least this share of the likeliest token's probability; 0 from all."},
    )
    rollout_engine: str = field(
        default=PpoArguments.rollout_engine,
        metadata={"help": f"What draws: {' or '.join(ENGINES)} (the package vllm, docs/vllm.md)."},
    )
    dtype: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(DTYPE_NAMES)}; default: as the model was saved."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            self.max_new_tokens >= 1, f"--max_new_tokens expects a whole number from 1 up, got {self.max_new_tokens}"
        )
        mistakes.require(self.temperature >= 0, f"--temperature expects 0 or more, got {self.temperature}")
        mistakes.require(self.top_k >= 0, f"--top_k expects 0 (all tokens) or more, got {self.top_k}")
        mistakes.require(0 < self.top_p <= 1, f"--top_p expects more than 0 and at most 1, got {self.top_p}")
        mistakes.require(0 <= self.min_p <= 1, f"--min_p expects a number from 0 to 1, got {self.min_p}")
        mistakes.require_one_of("--rollout_engine", self.rollout_engine, ENGINES)
        mistakes.require(
            self.dtype is None or self.dtype in DTYPE_NAMES,
            f"--dtype expects one of {', '.join(DTYPE_NAMES)}, got '{self.dtype}'",
        )
