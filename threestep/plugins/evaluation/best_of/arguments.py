"""The flags of best of n. Cheap to import for `--help`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.evaluation.arguments import EVALUATE_GROUPS, SPLITS, EvaluateArguments
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.data.arguments import ShownArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.arguments import PromptSamplesArguments
from training.utils.rewards.arguments import CheckerArguments

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class BestOfArguments:
    """The model, the number of responses it draws, and which of them are kept."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        EvaluateArguments, "Model that generates the responses: a folder or a hub name (required).", topic="model"
    )
    reward_model: str | None = flag_of(EvaluateArguments)
    split: str = flag_of(ShownArguments, "Split of step 3's rows: train or eval.", default="train", choices=SPLITS)
    per_device_eval_batch_size: int = flag_of(
        EvaluateArguments,
        "Prompts per batch on each rank; an interrupted run loses at most one batch per rank.",
        topic="batch",
    )
    part: str = flag(
        "1/1",
        "Use only part k of n of the prompts, written as k/n: every n-th prompt, starting with the k-th. Each round of "
        "`threestep all` uses one part.",
        "part",
    )
    num_samples_per_prompt: int = flag_of(
        PromptSamplesArguments, "n, the number of responses generated per prompt; the best is kept.", default=8
    )
    keep_best: int = flag(
        1,
        "Responses to keep per prompt, one row each: the best paired with the worst, the second best with the second "
        "worst, and so on.",
        "responses >= 1",
        may_change=True,
    )
    min_reward: float | None = flag(
        None, "Keep only responses with at least this reward (rejection sampling); default: no minimum.", "score",
        may_change=True,
    )  # fmt: skip
    keep_cut: bool = flag(
        False,
        "Also keep responses cut off by --max_new_tokens; steps 1 and 2 append an end token, which the model did not "
        "generate.",
        may_change=True,
    )
    checker: str | None = flag_of(
        CheckerArguments,
        "A rule that scores every response but never picks one: a name that --reward accepts, or your own as "
        "FILE.py:NAME. The curve shows its score for the response that the reward picks.",
    )
    overwrite: bool = flag_of(
        CheckpointArguments,
        "Remove an earlier run's results from --output_dir; without this flag, the same command resumes that run or "
        "rewrites its results.",
        may_change=True,
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.model_name_or_path), "--model_name_or_path expects a model folder or hub name, got nothing"
        )
        mistakes.require(
            self.places(1) is not None,
            f"--part expects k/n with k from 1 to n, such as 1/3, got '{self.part}'",
        )
        mistakes.require(
            self.keep_best <= self.num_samples_per_prompt,
            f"--keep_best expects at most --num_samples_per_prompt ({self.num_samples_per_prompt}), got "
            f"{self.keep_best}; lower it, or raise --num_samples_per_prompt",
        )

    def places(self, count: int) -> range | None:
        """The places of --part among `count` prompts; None if it is malformed."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.part)
        k, n = map(int, found.groups()) if found else (0, 0)
        return range(k - 1, count, n) if 1 <= k <= n else None


BEST_OF_GROUPS = tuple(BestOfArguments if group is EvaluateArguments else group for group in EVALUATE_GROUPS)
