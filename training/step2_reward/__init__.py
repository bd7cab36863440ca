"""Step 2: a reward model from pairs of chosen and rejected responses."""

from __future__ import annotations

from training.step2_reward.arguments import RewardModelArguments
from training.utils.data.arguments import PROMPT_FLAGS, SENTENCE_FLAGS
from training.utils.flags.step import NORM, RATE, SPEED, ClosingRow, Curve, Headline, SampleWords, Step, StepFigures
from training.utils.setup.flags import FIRST_FLAGS, ONE_MODEL_GROUPS

STEP = Step(
    name="step2_reward",
    label="reward model",
    title="reward model",
    groups=(*ONE_MODEL_GROUPS, RewardModelArguments),
    reads_media=True,
    unread=(*SENTENCE_FLAGS, *PROMPT_FLAGS),
    first_flags=FIRST_FLAGS,
    inputs={"model_name_or_path": "step1_sft"},
    figures=StepFigures(
        curves=(
            Curve("Loss", "per prompt", {"training": "train/loss", "held-out": "eval/loss"}),
            Curve(
                "Accuracy",
                "share of pairs whose chosen response scores higher",
                {"training": "train/accuracy", "held-out": "eval/accuracy"},
            ),
            Curve("Score gap", "chosen minus rejected", {"held-out": "eval/score_gap"}),
            NORM,
            SPEED,
            RATE,
        ),
        evaluates=("loss", "accuracy", "accuracy_*", "score_gap", "calibration_error", "chosen_*", "rejected_*"),
        headlines=(Headline("Pair accuracy", "eval/accuracy"), Headline("Score gap", "eval/score_gap")),
        closing=(ClosingRow("reward model's pair accuracy", after=("reward_pair_accuracy", "eval_accuracy")),),
        samples=SampleWords(
            note="Held-out pairs with their scores before and after training. margin: chosen minus rejected "
            "(with more than two responses, the smallest of all pairs); a negative margin means the wrong order."
        ),
    ),
)
