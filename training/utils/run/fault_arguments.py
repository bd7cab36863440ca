"""The flags of what a run does when something breaks. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes

RANK_TIMEOUT_SECONDS = 1800.0  # torch.distributed's own for gloo; DeepSpeed's 10 minutes are short for a slow disk


@dataclass
class FaultArguments:
    """Steps that come out as NaN, and ranks that do not answer."""

    max_bad_steps: int = field(
        default=10,
        metadata={
            "help": "An optimizer step whose loss or gradient is not finite is skipped and counted (its row ids: "
            "OUTPUT_DIR/bad_steps.jsonl), and this many end the run. A sound run in fp32 or bf16 has none; overflows "
            "by which fp16 finds its loss scale do not count."
        },
    )
    rank_timeout: float = field(
        default=RANK_TIMEOUT_SECONDS,
        metadata={
            "help": "Seconds that a rank waits for the others before the run ends with an error: for a rank that "
            "hangs. One that dies is found out at once."
        },
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        got = self.max_bad_steps
        mistakes.require(got >= 1, f"--max_bad_steps expects a whole number from 1 up, got {got}")
        mistakes.require(
            0 < self.rank_timeout < 1e8, f"--rank_timeout expects more than 0 seconds, got {self.rank_timeout}"
        )
