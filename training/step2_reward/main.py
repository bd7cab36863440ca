"""Step 2: a reward model from pairs of chosen and rejected responses.

python -m training.step2_reward.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from training.step2_reward import STEP
from training.step2_reward.arguments import RewardModelArguments, check_margins, check_sharing
from training.utils.setup.step_program import one_model_program

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags
    from training.utils.setup.training_run import TrainingResult, TrainingRun


def train(run: TrainingRun[Any], flags: OneModelFlags) -> TrainingResult:
    """Train on pairs, measure the scale of the scores."""
    from training.step2_reward.loss import LossOptions
    from training.step2_reward.trainer import RewardTrainer
    from training.utils.loading.configurations import ScoreScale, set_score_scale

    reward: RewardModelArguments = flags.of_step
    options = LossOptions(reward.margin_scale, reward.label_smoothing, reward.center_coef)
    trainer = RewardTrainer(run, options, from_first_difference=reward.loss_from == "first_difference")
    result = trainer.train()
    chosen = trainer.chosen_scores(reward.normalization_rows)
    model: Any = run.engine.module.model
    set_score_scale(model.config, ScoreScale(chosen.mean, chosen.std) if chosen else None)
    report = {"evaluation": result.after, "before": result.before, "training_chosen": chosen}
    in_json = {name: part and asdict(part) for name, part in report.items()}
    return replace(result, reports={"reward_report.json": in_json})


main = one_model_program(
    __name__, STEP, train, rows="ranked", scores=True, check=check_sharing, check_rows=check_margins
)
