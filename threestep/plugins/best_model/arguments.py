"""The flags of the best model and of early stopping. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class BestModelArguments:
    """Saving and ending by evaluations."""

    topic: ClassVar[str] = "checkpoints"
    may_change: ClassVar[bool] = True

    load_best_model_at_end: bool = flag(
        False,
        "Write a checkpoint after each evaluation that is the best so far, keep it in addition to those that "
        "--keep_last keeps, and end with its weights: OUTPUT_DIR/model is the best model, not the last.",
    )
    early_stopping: int = flag(
        0,
        "End training early, and save the model, after this many evaluations in a row without a new best; 0 disables "
        "early stopping. With --load_best_model_at_end, the best model is saved.",
        "evaluations >= 0",
        aliases=["--early_stopping_patience"],
    )
    metric_for_best_model: str | None = flag(
        None,
        "The evaluation metric that decides which model is best, such as accuracy. Default: reward in step 3, loss "
        "elsewhere.",
    )
    greater_is_better: bool | None = flag(
        None, "Whether a greater value of the metric is better. Default: true, except for losses and perplexities."
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        for name in ("metric_for_best_model", "greater_is_better"):
            mistakes.require(
                self.load_best_model_at_end or self.early_stopping > 0 or getattr(self, name) is None,
                f"--{name} {getattr(self, name)} needs --load_best_model_at_end or --early_stopping; pass one of "
                f"them, or remove --{name}",
            )
