"""The flags of how a run handles failures. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.run.flags import flag

RANK_TIMEOUT_SECONDS = 1800.0  # torch.distributed's own for gloo; DeepSpeed's 10 minutes are short for a slow disk


@dataclass
class FaultArguments:
    """Steps with NaN or infinity, and ranks that hang."""

    max_bad_steps: int = flag(
        10,
        "Number of skipped optimizer steps that ends the run. A step is skipped if its loss or gradient is "
        "not finite (its row ids: OUTPUT_DIR/bad_steps.jsonl). A sound run in fp32 or bf16 has none; overflows by "
        "which fp16 finds its loss scale do not count.",
        least=1,
    )
    rank_timeout: float = flag(
        RANK_TIMEOUT_SECONDS,
        "Seconds that a rank waits for the others before the run ends with an error. It catches ranks that "
        "hang; a rank that dies is noticed at once.",
        above=0,
        below=1e8,
    )
