"""Step 2: a reward model from pairs of chosen and rejected responses.

    python -m training.step2_reward.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT

One process needs no launcher; several ranks start by `deepspeed`, torchrun or `accelerate launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from training.step2_reward.arguments import RewardArguments
from training.utils.data.arguments import DataArguments
from training.utils.engine.arguments import EngineArguments
from training.utils.models.arguments import ModelArguments
from training.utils.models.settings import check_model_folder
from training.utils.run import deepspeed_chat
from training.utils.run.arguments import parse_arguments, resolved_settings
from training.utils.run.checkpoint_arguments import CheckpointArguments
from training.utils.run.fault_arguments import FaultArguments
from training.utils.run.program import run_program
from training.utils.run.report_arguments import ReportArguments
from training.utils.run.run_arguments import RunArguments

GROUPS = (
    RunArguments,
    CheckpointArguments,
    FaultArguments,
    ReportArguments,
    DataArguments,
    ModelArguments,
    EngineArguments,
    RewardArguments,
)


def main(argv: Sequence[str]) -> None:
    """Parse, load data and model, train, save."""
    groups = parse_arguments(GROUPS, argv, __doc__ or "", deepspeed_chat.REWARD)
    run, saving, faults, reporting, data, model, engine, reward = groups
    check_model_folder(model.model_name_or_path)
    if run.dry_run:
        return say_plan(groups, reward.learning_rate, data.max_seq_len)

    from training.step2_reward.batches import check_margins
    from training.step2_reward.loss import LossOptions
    from training.step2_reward.report import gain_sentence
    from training.step2_reward.trainer import RewardTrainer
    from training.utils.data.build import build_phase
    from training.utils.data.chat import conversation_end, use_chat_template
    from training.utils.data.fingerprint import digest_files
    from training.utils.engine.bad_steps import BadSteps
    from training.utils.engine.checkpoints import kept_run, only_run_in, plan_checkpoints
    from training.utils.engine.setup import load_under, loop_settings, may_pack, start_run, whole_steps
    from training.utils.engine.startup import started_process_group
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.loading import (
        add_tokens,
        check_positions,
        load_scalar_model,
        load_tokenizer,
        model_files,
        with_pad_apart,
    )
    from training.utils.models.saving import save_model
    from training.utils.models.score_scale import ScoreScale, set_score_scale
    from training.utils.models.token_model import ScalarModel
    from training.utils.run.metrics import say
    from training.utils.run.report.writing import report_at_end

    settings = engine.settings(reward.learning_rate)
    with started_process_group(faults.rank_timeout) as ranks, only_run_in(run.output_dir, ranks):
        plan = plan_checkpoints(saving, run.output_dir, "training.step2_reward.main", resolved_settings(groups), ranks)
        folder = start_run(run, resolved_settings(groups), ranks)
        check_positions(model.settings(), data.max_seq_len, "--max_seq_len")
        tokenizer = use_chat_template(
            load_tokenizer(model.model_name_or_path, model.pad_token, trust_remote_code=model.trust_remote_code), data
        )
        added = add_tokens(tokenizer, data.tokens_in_need)
        tokenizer = with_pad_apart(tokenizer, conversation_end(data, tokenizer))
        phase = build_phase(2, data, tokenizer, run.seed, ranks.is_main, say)
        check_margins(phase.train, reward.margin_scale)
        steps = whole_steps(engine, len(phase.train), ranks)

        def load(dtype: Any) -> Any:
            return load_scalar_model(model.settings(), dtype, tokenizer, must_have_head=False, added_tokens=added)

        scorer = load_under(settings, ranks, load)
        trained = TrainingEngine(ScalarModel(scorer), settings, ranks, steps[0])
        needs = data.needs_segments
        packed = may_pack(engine.padded, scorer, trained, trained, data.max_seq_len, say, needs_segments=needs)
        loop = loop_settings(engine, steps, data.max_seq_len, scorer, packed, ranks, tokenizer.pad_token_id, run)

        folder.write_json("data_report.json", asdict(phase.report))
        data_is = phase.train.manifest["fingerprint"]
        again = model_files(model.model_name_or_path) if model.lora_dim else []  # what a resumed run loads anew
        start = {"model_name_or_path": partial(digest_files, again, data.cache_dir)}
        kept = kept_run(plan, folder, {"model": trained}, data_is, ranks, tokenizers={"model": tokenizer}, start=start)
        with kept as (metrics, checkpoints):
            options = LossOptions(reward.margin_scale, reward.label_smoothing, reward.center_coef)
            bad_steps = BadSteps(faults.max_bad_steps, folder.path, ranks.is_main, engine.dtype)
            rows = (phase.train, phase.eval)
            trainer = RewardTrainer(trained, *rows, loop, metrics, options, checkpoints, bad_steps)
            result = trainer.train()
            chosen = trainer.chosen_scores(reward.normalization_rows)

        set_score_scale(scorer.config, ScoreScale(chosen.mean, chosen.std) if chosen else None)
        tensors = trained.full_state(scorer)
        if ranks.is_main:
            save_model(folder.model, scorer, tensors, tokenizer)
        report = {"evaluation": result.after, "before": result.before, "training_chosen": chosen}
        folder.write_json("reward_report.json", {name: part and asdict(part) for name, part in report.items()})
        folder.write_summary(result.summary())
        report_at_end(folder.path, reporting.report and ranks.is_main)
        gain = gain_sentence(result.before, result.after)
        say(f"step 2: {gain}, in {result.seconds:.0f} s; the model is in {folder.model}", ranks.is_main)


def say_plan(groups: Sequence[Any], learning_rate: float, max_seq_len: int) -> None:
    """Say what the run would be (`--dry_run`)."""
    from training.utils.engine.dry_run import dry_run

    dry_run("training.step2_reward.main", groups, learning_rate, max_seq_len, scalar=True, responses=2)


if __name__ == "__main__":
    run_program(main)
