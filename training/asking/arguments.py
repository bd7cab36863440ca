"""The flags of evaluating finished models. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

SPLITS = ("eval", "train")


@dataclass
class AskedArguments:
    """The models and rows to evaluate."""

    topic: ClassVar[str] = "evaluation"

    model_name_or_path: str = flag("", "Model to evaluate: a folder or a hub name (required).", unit="model")
    baseline: str | None = flag(None, "win_rate: the model to compare it with.", unit="model")
    reward_model: str | None = flag(None, "The reward model that `model` in --reward stands for.", unit="model")
    split: str = flag("eval", "Rows of the phase: eval or train.", choices=SPLITS)
    per_device_eval_batch_size: int = flag(
        EngineArguments.per_device_eval_batch_size, "Prompts that a rank answers together.", least=1, unit="prompts"
    )

    val_samples: int = flag(
        1,
        "Answers to each prompt; above 1 also the deviation, best (of 0 and 1: pass@k), worst and majority of k.",
        least=1,
        unit="responses",
    )

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(
            bool(self.model_name_or_path), "--model_name_or_path expects a model folder or hub name, got nothing"
        )
