"""Step 2: a reward model from pairs of chosen and rejected responses.

python -m training.step2_reward.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
"""

from dataclasses import asdict, replace

from training.step2_reward import STEP
from training.step2_reward.arguments import RewardModelArguments, check_margins, check_sharing
from training.utils.setup.one_model import OpenedModel, TrainingResult, one_model_program


def train(opened: OpenedModel, reward: RewardModelArguments) -> TrainingResult:
    """Train on pairs, measure the scale of the scores."""
    from training.step2_reward.loss import LossOptions
    from training.step2_reward.trainer import RewardTrainer
    from training.utils.loading.score_scale import ScoreScale, set_score_scale

    options = LossOptions(reward.margin_scale, reward.label_smoothing, reward.center_coef)
    trainer = RewardTrainer(opened.training, options, from_first_difference=reward.loss_from == "first_difference")
    result = trainer.train()
    chosen = trainer.chosen_scores(reward.normalization_rows)
    set_score_scale(opened.model.config, ScoreScale(chosen.mean, chosen.std) if chosen else None)
    report = {"evaluation": result.after, "before": result.before, "training_chosen": chosen}
    in_json = {name: part and asdict(part) for name, part in report.items()}
    return replace(result, reports={"reward_report.json": in_json})


main = one_model_program(
    __name__, STEP, train, rows="ranked", scores=True, check=check_sharing, check_rows=check_margins
)
