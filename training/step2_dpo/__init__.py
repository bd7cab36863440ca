"""Step 2 without a reward model: the policy itself is trained on ranked responses (direct preference optimization)."""

from __future__ import annotations

from training.step2_dpo.arguments import DpoArguments
from training.utils.data.arguments import PROMPT_FLAGS, SENTENCE_FLAGS
from training.utils.flags.step import NORM, RATE, SPEED, ClosingRow, Curve, Headline, SampleWords, Step, StepFigures
from training.utils.setup.flags import FIRST_FLAGS, ONE_MODEL_GROUPS

STEP = Step(
    name="step2_dpo",
    label="DPO",
    title="direct preference optimization",
    groups=(*ONE_MODEL_GROUPS, DpoArguments),
    reads_media=True,
    unread=(*SENTENCE_FLAGS, *PROMPT_FLAGS),
    first_flags=FIRST_FLAGS,
    inputs={"model_name_or_path": "step1_sft"},
    variant=("loss_type", "DPO ({})"),
    figures=StepFigures(
        curves=(
            Curve("Loss", "per prompt", {"training": "train/loss", "held-out": "eval/loss"}),
            Curve(
                "Accuracy",
                "share of pairs whose chosen response has the higher implicit reward",
                {"training": "train/accuracy", "held-out": "eval/accuracy"},
            ),
            Curve(
                "Implicit reward",
                "of training pairs",
                {"chosen": "train/chosen_reward", "rejected": "train/rejected_reward"},
            ),
            Curve(
                "Reward margin",
                "chosen minus rejected",
                {"training": "train/reward_margin", "held-out": "eval/reward_margin"},
            ),
            NORM,
            SPEED,
            RATE,
        ),
        evaluates=("loss", "accuracy", "reward_margin", "chosen_reward", "rejected_reward"),
        headlines=(Headline("DPO pair accuracy", "eval/accuracy"), Headline("Reward margin", "eval/reward_margin")),
        closing=(
            ClosingRow("accuracy of the implicit reward", after=("dpo_pair_accuracy", "eval_accuracy")),
            ClosingRow("implicit reward, chosen minus rejected", after=("dpo_reward_margin", "eval_reward_margin")),
        ),
        samples=SampleWords(
            note="Held-out pairs with their implicit rewards before and after training. margin: chosen minus rejected "
            "(with more than two responses, the smallest of all pairs); a negative margin means the wrong order.",
            score="implicit reward",
        ),
    ),
)
