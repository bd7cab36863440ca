"""Flags of other programs that step 2's reward model reads: DeepSpeed-Chat's, and Hugging Face's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from training.utils.compat.hf_flags import HF_REWARD_FLAGS
from training.utils.compat.old_flags import ONE_MODEL_OLD_FLAGS, OldFlag, Renamed, whole_number


def _eval_rows(value: str, given: Mapping[str, str]) -> list[str]:
    batch = whole_number("--per_device_eval_batch_size", given.get("--per_device_eval_batch_size", "16"))
    rows = whole_number("--eval_iters", value) * batch * int(os.environ.get("WORLD_SIZE", "1"))
    return ["--max_eval_rows", str(rows)]


REWARD_OLD_FLAGS: dict[str, OldFlag] = {
    **HF_REWARD_FLAGS,
    **ONE_MODEL_OLD_FLAGS,
    "--eval_iters": Renamed(
        "--max_eval_rows ROWS", "ROWS is eval_iters x per_device_eval_batch_size x ranks", words=_eval_rows
    ),
}
