"""The flag of drafts in training. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag


@dataclass
class VllmDraftArguments:
    """Step 3: a finished model has no head to draft with."""

    topic: ClassVar[str] = "rollout"

    vllm_speculate: int = flag(
        0,
        "With --mtp_num_layers and --rollout_engine vllm: number of tokens that vLLM drafts with the MTP head, "
        "which is sent to vLLM along with the weights. Greedy responses do not change, and sampled ones keep their "
        "distribution. 0 disables drafting.",
        "0 <= tokens <= 8",
    )
