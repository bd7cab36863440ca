"""Step 1: supervised fine-tuning on chosen responses."""

from __future__ import annotations

from training.step1_sft.arguments import SftArguments
from training.utils.data.arguments import PROMPT_FLAGS
from training.utils.flags.step import NORM, RATE, SPEED, ClosingRow, Curve, Headline, SampleWords, Step, StepFigures
from training.utils.setup.flags import FIRST_FLAGS, ONE_MODEL_GROUPS

STEP = Step(
    name="step1_sft",
    label="SFT",
    title="supervised fine-tuning",
    groups=(*ONE_MODEL_GROUPS, SftArguments),
    reads_media=True,
    unread=(*PROMPT_FLAGS, "margin_column"),
    first_flags=FIRST_FLAGS,
    inputs={"model_name_or_path": None},
    figures=StepFigures(
        curves=(
            Curve("Loss", "nats per token", {"training": "train/loss", "held-out": "eval/loss"}),
            Curve(
                "Token accuracy",
                "share of tokens that are the model's first choice",
                {"training": "train/token_accuracy", "held-out": "eval/token_accuracy"},
            ),
            NORM,
            SPEED,
            RATE,
        ),
        evaluates=("loss", "perplexity", "token_accuracy"),
        headlines=(Headline("SFT loss", "eval/loss"), Headline("Token accuracy", "eval/token_accuracy")),
        closing=(
            ClosingRow(
                "SFT loss",
                before=("sft_eval_loss_before", "eval_loss_before"),
                after=("sft_eval_loss_after", "eval_loss_after"),
            ),
        ),
        samples=SampleWords(
            labels=("start model", "SFT"),
            note="Held-out prompts with the reference response and the model's greedy responses (at most 64 tokens) "
            "before and after training. loss: the row's loss in nats per token.",
        ),
    ),
)
