"""Step 2: a reward model from pairs of chosen and rejected responses.

python -m training.step2_reward.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
"""

from dataclasses import asdict
from functools import partial

from training.step2_reward import STEP
from training.step2_reward.arguments import RewardModelArguments
from training.utils.opening.one_model import OneModelFlags, one_model, one_model_program
from training.utils.run.program import run_program


@one_model_program(STEP, __doc__, scores=True, responses=2)
def main(flags: OneModelFlags, reward: RewardModelArguments) -> None:
    """Open the run, train on pairs, measure the scale of the scores, save."""
    from training.step2_reward.trainer import RewardTrainer
    from training.utils.loading.score_scale import ScoreScale, set_score_scale
    from training.utils.preference.batches import check_margins

    check_rows = partial(check_margins, margin_scale=reward.margin_scale)
    with one_model(flags, phase=2, scores=True, check_rows=check_rows) as opened:
        trainer = RewardTrainer(opened.training, reward.options())
        result = trainer.train()
        chosen = trainer.chosen_scores(reward.normalization_rows)
        set_score_scale(opened.model.config, ScoreScale(chosen.mean, chosen.std) if chosen else None)
        report = {"evaluation": result.after, "before": result.before, "training_chosen": chosen}
        opened.folder.write_json("reward_report.json", {name: part and asdict(part) for name, part in report.items()})
        opened.finish(result)


if __name__ == "__main__":
    run_program(main)
