"""Step 3: PPO, GRPO and their relatives against the reward model.

    python -m training.step3_ppo.main --actor_model_name_or_path SFT_MODEL --critic_model_name_or_path REWARD_MODEL \\
        --data_path jsonl:prompts.jsonl --output_dir OUT
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from training.step3_ppo import STEP
from training.step3_ppo.flags.ppo_flags import PpoFlags
from training.utils.flags.arguments import parse_arguments, resolved_settings
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.run.program import run_program

if TYPE_CHECKING:
    from training.step3_ppo.flags.checks import Components
    from training.utils.engine.ranks.startup import Ranks


def main(argv: Sequence[str]) -> None:
    """Parse and check the flags, then plan or run."""
    flags = PpoFlags(*parse_arguments(STEP.groups, argv, __doc__ or "", STEP.old_flags, STEP.first_flags))
    for path in (flags.roles.actor_model_name_or_path, flags.roles.critic_model_name_or_path):
        if path:
            check_model_folder(path)

    from training.step3_ppo.flags.checks import checked_components
    from training.utils.checkpoints.run_lock import only_run_in
    from training.utils.engine.ranks.startup import started_process_group

    components = checked_components(flags)
    if flags.run.dry_run:
        from training.step3_ppo.dry_run import dry_run

        return dry_run(flags, components)
    shares_gpu = components.rollout_engine.frees_gpu_memory and flags.vllm.vllm_sleep
    group = started_process_group(flags.faults.rank_timeout, shares_gpu)
    with group as ranks, only_run_in(flags.run.output_dir, ranks):
        run(flags, components, ranks)
    if components.environments is not None:
        components.environments.close()


def run(flags: PpoFlags, components: Components, ranks: Ranks) -> None:
    """Load prompts and models, train, save. A collective."""
    from training.step3_ppo.flags.checks import check_beside_media, check_models
    from training.step3_ppo.learning.learning import Updates
    from training.step3_ppo.parts.assembly import (
        check_roles_saving,
        checked_roles,
        finish,
        make_parts,
        start_digests,
        wanted_score_scale,
        with_head,
    )
    from training.step3_ppo.parts.inputs import adopt_styles, load_inputs, load_tokenizers
    from training.step3_ppo.roles.loading import RolesNeeded, load_roles
    from training.step3_ppo.trainer import PpoTrainer
    from training.utils.base.console import log
    from training.utils.checkpoints.loop import checkpointed_run
    from training.utils.checkpoints.parts import CheckpointParts
    from training.utils.checkpoints.plan import plan_checkpoints
    from training.utils.engine.bad_steps import BadSteps
    from training.utils.opening.setup import start_run, with_head_chunk
    from training.utils.outputs.room import check_room
    from training.utils.run.run_folder import BAD_STEPS

    run, settings = flags.run, resolved_settings(flags)
    plan = plan_checkpoints(flags.saving, run.output_dir, STEP.program, settings, ranks, STEP.defaults)
    check_models(flags, components.with_critic_tokenizer)
    tokenizers = load_tokenizers(flags, components.with_critic_tokenizer)
    plan = plan.decided(adopt_styles(tokenizers, flags.data.chat, plan.began_with("prompt_style"), ranks))
    plan = with_head_chunk(plan, flags.roles.model("actor"), flags.roles.dtype, ranks)
    folder = start_run(run, plan.flags_in_use, ranks)
    scale = wanted_score_scale(flags.roles, flags.ppo)
    inputs = load_inputs(flags, tokenizers.actor, ranks, log, components.environments)
    check_beside_media(flags, components, inputs.media)
    loaded = load_roles(
        replace(flags.roles, head_chunk_mb=plan.settings["head_chunk_mb"]),
        tokenizers,
        ranks,
        inputs.optimizer_steps,
        inputs.warmup_steps,
        flags.longest_tokens,
        RolesNeeded(
            critic=components.algorithm.estimator.needs_critic,
            reference=components.algorithm.wants_reference,
            reward_model=components.with_reward_model,
        ),
        inputs.media,
    )
    roles = with_head(checked_roles(flags, loaded), flags, inputs.optimizer_steps - inputs.warmup_steps)
    rollout_engine, evaluator_of, loop = make_parts(flags, components, inputs, roles, tokenizers.actor, scale)
    check_roles_saving(roles, tokenizers, folder, flags)
    folder.write_json("data_report.json", asdict(inputs.data_report))
    digests = start_digests(flags.roles, components, flags.data.cache.cache_dir)
    parts = CheckpointParts(
        roles.trained, ranks, roles.average, tokenizers.saved_with(roles.shares_trunk), roles.processor
    )
    if not flags.ppo.val_only:
        check_room(folder.path, flags.saving, parts)
    with checkpointed_run(plan, folder, parts, inputs.data_fingerprint, digests, inputs.rollouts_per_epoch) as (
        metrics,
        checkpoints,
    ):
        bad_steps = BadSteps(flags.faults.max_bad_steps, folder.run_log(BAD_STEPS), ranks.is_main, flags.roles.dtype)
        trainer = PpoTrainer(
            roles,
            rollout_engine,
            inputs.train,
            Updates(roles, loop, inputs.texts, bad_steps),
            evaluator_of(metrics=metrics, folder=folder),
            loop,
            metrics,
            checkpoints,
        )
        result = trainer.train()

    finish(flags, settings, roles, tokenizers, folder, result)


if __name__ == "__main__":
    run_program(main, output_is_log=True)
