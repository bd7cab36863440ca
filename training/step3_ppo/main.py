"""Step 3: PPO, GRPO and their relatives against the reward model.

    python -m training.step3_ppo.main --actor_model_name_or_path SFT_MODEL --critic_model_name_or_path REWARD_MODEL \\
        --data_path jsonl:prompts.jsonl --output_dir OUT

One process needs no launcher; several ranks start by `deepspeed`, torchrun or `accelerate launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from training.step3_ppo.algorithm_arguments import AlgorithmArguments
from training.step3_ppo.arguments import PpoArguments, RolesArguments
from training.step3_ppo.reward_arguments import RewardArguments
from training.step3_ppo.vllm_arguments import VllmArguments
from training.utils.data.arguments import DataArguments
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
    RolesArguments,
    PpoArguments,
    AlgorithmArguments,
    RewardArguments,
    VllmArguments,
)


def main(argv: Sequence[str]) -> None:
    """Parse, load prompts and models, train, save."""
    groups = parse_arguments(GROUPS, argv, __doc__ or "", deepspeed_chat.PPO)
    run, saving, faults, reporting, data, roles_arguments, ppo, algorithm, reward, vllm = groups
    check_model_folder(roles_arguments.actor_model_name_or_path)
    if roles_arguments.critic_model_name_or_path:
        check_model_folder(roles_arguments.critic_model_name_or_path)

    from training.step3_ppo.assembly import (
        check_lengths,
        check_rollout_dump,
        check_timeouts,
        checked_names,
        chosen_scale,
        closing_sentence,
        load_prompts,
        load_tokenizers,
        make_parts,
        role_settings,
        save_roles,
        start_content,
        summary_of,
    )
    from training.step3_ppo.roles import load_roles
    from training.step3_ppo.trainer import PpoTrainer
    from training.utils.engine.bad_steps import BadSteps
    from training.utils.engine.checkpoints import kept_run, only_run_in, plan_checkpoints
    from training.utils.engine.setup import start_run
    from training.utils.engine.startup import started_process_group
    from training.utils.run.metrics import say
    from training.utils.run.report.writing import report_at_end

    names = checked_names(roles_arguments, ppo, algorithm, reward)
    check_timeouts(faults, reward)
    check_rollout_dump(saving, ppo)
    if run.dry_run:
        return say_plan(groups, names)
    with started_process_group(faults.rank_timeout) as ranks, only_run_in(run.output_dir, ranks):
        plan = plan_checkpoints(saving, run.output_dir, "training.step3_ppo.main", resolved_settings(groups), ranks)
        folder = start_run(run, resolved_settings(groups), ranks)
        check_lengths(roles_arguments, data, ppo, names.with_critic_tokenizer)
        tokenizers = load_tokenizers(roles_arguments, data, names.with_critic_tokenizer)
        scale = chosen_scale(roles_arguments, ppo)
        inputs = load_prompts(run, data, ppo, algorithm.critic_warmup, tokenizers.actor, ranks, say)
        settings = role_settings(roles_arguments, names, inputs)
        roles = load_roles(settings, tokenizers, ranks, total_steps=inputs.optimizer_steps)
        engines = {"actor": roles.actor, "critic": roles.critic}
        folder.write_json("data_report.json", asdict(inputs.data_report))
        start = start_content(roles_arguments, names, data.cache_dir)
        saved_with = tokenizers.saved_with(roles.shares_trunk)
        about = (inputs.data_fingerprint, ranks, roles.average, saved_with, start)
        with kept_run(plan, folder, engines, *about) as (metrics, checkpoints):
            rollout_engine, evaluator, loop = make_parts(
                roles, names, inputs, tokenizers.actor, scale, run, data, ppo, reward, vllm, metrics, folder, say
            )
            bad_steps = BadSteps(faults.max_bad_steps, folder.path, ranks.is_main, roles_arguments.dtype)
            rows = (inputs.train, inputs.texts)
            trainer = PpoTrainer(roles, rollout_engine, *rows, evaluator, loop, metrics, checkpoints, bad_steps)
            result = trainer.train()

        if not ppo.val_only:
            save_roles(roles, tokenizers, folder)
        summary = summary_of(result)
        folder.write_summary(summary)
        report_at_end(folder.path, reporting.report and ranks.is_main)
        say(closing_sentence(summary, folder, ppo.val_only), ranks.is_main)


def say_plan(groups: Sequence[Any], names: Any) -> None:
    """Say what the run would be (`--dry_run`). names: what `checked_names` gave."""
    from training.step3_ppo.dry_run import dry_run

    dry_run(groups, names)


if __name__ == "__main__":
    run_program(main)
