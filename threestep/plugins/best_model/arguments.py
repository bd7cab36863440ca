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
        "Write a checkpoint after each evaluation that is the best so far, keep it beside --keep_last, and end with "
        "its weights: OUTPUT_DIR/model is the best, not the last.",
    )
    early_stopping: int = flag(
        0,
        "End training, with its model, after this many evaluations in a row of which none is better than the best "
        "before them; 0: never. --load_best_model_at_end then takes the best.",
        "evaluations >= 0",
        aliases=["--early_stopping_patience"],
    )
    metric_for_best_model: str | None = flag(
        None, "What is best: a figure of evaluations, such as accuracy; default: in step 3 reward, else loss."
    )
    greater_is_better: bool | None = flag(None, "Whether more of it is better; default: unless it is a loss.")

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        for name in ("metric_for_best_model", "greater_is_better"):
            mistakes.require(
                self.load_best_model_at_end or self.early_stopping > 0 or getattr(self, name) is None,
                f"--{name} {getattr(self, name)} is for --load_best_model_at_end, which is off; give it too (or "
                f"--early_stopping), or leave --{name} out",
            )
