"""The flags of evaluating finished models. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.data.arguments import AnswerDataArguments, ShownArguments
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.arguments import EvaluationArguments, SamplingArguments
from training.utils.generation.table import RolloutEngineFlags
from training.utils.models.arguments import ModelArguments
from training.utils.rewards.arguments import ScoringArguments
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

SPLITS = ("eval", "train")
BENCHMARKS = ("rewardbench2", "rewardbench")
# Fields of `ChatArguments` that training alone reads: programs that ask finished models have no flags for them.
OF_TRAINING = ("add_end_of_conversation_token", "bad_conversations", "chat_template", "train_turns")

# Flags of programs that ask finished models, which know more than training's: the style is saved with the model.
PROMPT_STYLE_TEXT = (
    "human_assistant ('Human: ... Assistant:'), as_stored (the question alone), chat_template, or auto: the style "
    "saved with the model, or else the tokenizer's chat template if it has one."
)
TEMPLATE_KWARGS_TEXT = "Extra chat template variables, as a JSON object; default: those saved with the model."
END_OF_ANSWER_TEXT = (
    "Token that ends an answer; default: the one saved with the model, or else the chat template's, or else "
    "the tokenizer's eos."
)


def flags_of_training(program: str) -> dict[str, str]:
    """Return flags of the steps that a program which evaluates refuses by name."""
    why = f"plans training memory, but {program} does not train; remove it"
    return {"--dry_run": why}


@dataclass
class EvaluateArguments:
    """The models and rows to evaluate."""

    topic: ClassVar[str] = "evaluation"

    model_name_or_path: str = flag_of(ModelArguments, "Model to evaluate: a folder or a hub name (required).")
    baseline: str | None = flag(None, "win_rate: the model to compare against.", "model")
    reward_model: str | None = flag(None, "The reward model that `model` in --reward refers to.", "model")
    split: str = flag_of(ShownArguments, "Split to evaluate: eval or train.", default="eval", choices=SPLITS)
    per_device_eval_batch_size: int = flag_of(EngineArguments, "Prompts per batch on each rank.", takes="prompts >= 1")
    val_samples: int = flag_of(EvaluationArguments)
    benchmark: str | None = flag(
        None, "reward_model: the published benchmark whose files --data_path names.", choices=BENCHMARKS
    )

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(
            bool(self.model_name_or_path), "--model_name_or_path expects a model folder or hub name, got nothing"
        )


EVALUATE_GROUPS = (
    RunArguments,
    AnswerDataArguments,
    EvaluateArguments,
    SamplingArguments,
    ScoringArguments,
    RolloutEngineFlags,
)
