"""Builds the parts of step 3 from its flags, so that main stays a table of contents and the trainer knows no flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.step3_ppo.algorithm import Algorithm, checked_algorithm, experience_settings, learning_settings
from training.step3_ppo.algorithm_arguments import AlgorithmArguments
from training.step3_ppo.arguments import PpoArguments, RolesArguments
from training.step3_ppo.evaluation import Evaluator, standard_error_of_gain
from training.step3_ppo.kl import WHOLE_KL_ESTIMATORS
from training.step3_ppo.prompt_source import PromptSource, open_prompt_source
from training.step3_ppo.reward_arguments import RewardArguments
from training.step3_ppo.rewards.calling import Rule
from training.step3_ppo.rewards.weighted import Reward, Rewards, found_rule, named_rewards, reads_model
from training.step3_ppo.roles import Roles, RoleSettings, Tokenizers
from training.step3_ppo.rollout import ENGINES, make_engine
from training.step3_ppo.rollout.bad_words import tokens_of_words
from training.step3_ppo.rollout.base import RolloutEngine, Sampling
from training.step3_ppo.rollout.vllm import VllmRollout, check_installed
from training.step3_ppo.settings import PpoResult, PpoSettings
from training.step3_ppo.shared_trunk import check_needs_critic
from training.step3_ppo.vllm_arguments import VllmArguments
from training.utils.data.arguments import DataArguments
from training.utils.data.build import build_phase
from training.utils.data.chat import conversation_end, use_chat_template
from training.utils.data.fingerprint import digest_files
from training.utils.data.phases import PromptRow, TextBlock
from training.utils.data.prompt_maker import PromptMaker
from training.utils.data.reports import BuildReport
from training.utils.data.tokenize import end_of_conversation_id
from training.utils.data.unsupervised import build_unsupervised
from training.utils.engine.setup import compute_meter, may_pack
from training.utils.engine.startup import Ranks
from training.utils.layout.order import steps_in
from training.utils.layout.planner import PlanSettings
from training.utils.models.attention import plan_for
from training.utils.models.flops import ComputeMeter, model_shape
from training.utils.models.loading import check_positions, load_tokenizer, model_files, same_tokenizer
from training.utils.models.saving import save_model
from training.utils.models.score_scale import ScoreScale, read_score_scale
from training.utils.run.checkpoint_arguments import CheckpointArguments
from training.utils.run.errors import Mistakes, ThreestepError
from training.utils.run.fault_arguments import FaultArguments
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import RunFolder


class Names(NamedTuple):
    """What the flags' names stand for."""

    rollout_engine: Callable[..., RolloutEngine]
    checker: Rule | None
    algorithm: Algorithm
    rewards: tuple[Reward, ...]
    share_trunk: bool = False

    @property
    def with_reward_model(self) -> bool:
        return reads_model(self.rewards)

    @property
    def with_critic_tokenizer(self) -> bool:
        """Whether anything starts from --critic_model_name_or_path."""
        return self.with_reward_model or (self.algorithm.estimator.needs_critic and not self.share_trunk)


@dataclass(frozen=True)
class Inputs:
    """What the trainer reads, and how long it will. warmup_steps: those of the optimizer_steps that train the critic
    alone."""

    train: PromptSource
    eval: Sequence[PromptRow]
    columns: Sequence[str]
    texts: Sequence[TextBlock] | None
    total_rollouts: int
    optimizer_steps: int
    warmup_steps: int
    ranks: Ranks
    data_fingerprint: str
    data_report: BuildReport


def checked_names(
    roles: RolesArguments, ppo: PpoArguments, algorithm_flags: AlgorithmArguments, reward_flags: RewardArguments
) -> Names:
    """Look every name up before a model loads; ThreestepError with near names for those that nothing has, and for what
    does not go together."""
    mistakes = Mistakes()
    engine = ppo.rollout_engine
    mistakes.require_one_of("--rollout_engine", engine, ENGINES)
    if engine == "vllm":
        mistakes.note(check_installed)
    checker = None
    if ppo.checker:
        checker = mistakes.note(found_rule, ppo.checker, reward_flags, "--checker")
    rewards = named_rewards(reward_flags, mistakes)
    algorithm = checked_algorithm(algorithm_flags, ppo, mistakes)
    if algorithm is not None:
        _check_critic_path(roles, ppo, algorithm, rewards, mistakes)
        check_needs_critic(roles, algorithm.flags.advantage, algorithm.estimator.needs_critic, mistakes)
        _check_reuse(roles, ppo, algorithm, mistakes)
    mistakes.raise_if_any()
    assert algorithm is not None  # where a name was unknown, a mistake was noted
    return Names(ENGINES[engine], checker, algorithm, rewards, roles.share_trunk)


def _check_critic_path(
    roles: RolesArguments, ppo: PpoArguments, algorithm: Algorithm, rewards: tuple[Reward, ...], mistakes: Mistakes
) -> None:
    wanted_by = "the reward 'model'" if reads_model(rewards) else ""
    if algorithm.estimator.needs_critic and not roles.share_trunk:
        wanted_by = f"the critic of --advantage {algorithm.flags.advantage}"
    mistakes.require(
        bool(roles.critic_model_name_or_path) or not wanted_by,
        f"--critic_model_name_or_path expects a model folder or hub name for {wanted_by}, got nothing; give step 2's "
        "model, or take --reward without model and an --advantage without critic",
    )
    mistakes.require(
        reads_model(rewards) or not ppo.normalize_reward_scores,
        "--normalize_reward_scores is of the reward model's scores, and --reward has no model; leave it out",
    )


def _check_reuse(roles: RolesArguments, ppo: PpoArguments, algorithm: Algorithm, mistakes: Mistakes) -> None:
    """Note where the forwards that read are not those that learn."""
    if not ppo.reuse_forwards:
        return
    for flag in ("actor_dropout", "critic_dropout", "lora_dropout"):
        rate = getattr(roles, flag)
        mistakes.require(
            rate == 0,
            f"--reuse_forwards reads and learns in one forward, and --{flag} {rate} would drop what log-probabilities "
            "and values are read from; give 0",
        )
    for flag in ("actor_zero_stage", "critic_zero_stage"):
        # Forwards before the first of their backwards: wrong gradients, in silence, under ZeRO-3 (deepspeed 0.19).
        mistakes.require(
            getattr(roles, flag) < 3,
            f"--reuse_forwards keeps forwards whose weights ZeRO-3 has let go, and --{flag} is 3; give 2 or less, or "
            "leave --reuse_forwards out",
        )
    mistakes.require(
        not (algorithm.flags.kl_in == "loss" and algorithm.flags.kl_estimator in WHOLE_KL_ESTIMATORS),
        "--reuse_forwards would keep all logits of a rollout for --kl_estimator full in the loss; leave one of them "
        "out, or give --kl_in reward",
    )


def check_rollout_dump(saving: CheckpointArguments, ppo: PpoArguments) -> None:
    """ThreestepError where a run that begins would write its rollouts among those of another."""
    folder = ppo.rollout_dump
    if folder is not None and saving.resume is None and any(Path(folder).glob("rollout_*")):
        raise ThreestepError(
            f"--rollout_dump expects a folder without rollouts, and {folder} has some; name another, or go on with "
            "the run that wrote them by --resume"
        )


def start_content(roles: RolesArguments, names: Names, cache_dir: str) -> dict[str, Callable[[], str]]:
    """What digests the models that a run loads at each start, by flag: the actor's start is its reference, the critic's
    the reward model."""
    paths = {"actor_model_name_or_path": roles.actor_model_name_or_path}
    if names.with_critic_tokenizer:
        paths["critic_model_name_or_path"] = roles.critic_model_name_or_path
    return {flag: partial(digest_files, model_files(path), cache_dir) for flag, path in paths.items()}


def check_timeouts(faults: FaultArguments, reward: RewardArguments) -> None:
    """ThreestepError where ranks would give up a rank before it may give up its reward function."""
    if reward.reward_timeout >= faults.rank_timeout:
        raise ThreestepError(
            f"--reward_timeout {reward.reward_timeout:g} expects less than --rank_timeout {faults.rank_timeout:g}, the "
            "seconds that the other ranks wait for one whose reward function is at work; lower the first or raise the "
            "second"
        )


def check_lengths(roles: RolesArguments, data: DataArguments, ppo: PpoArguments, with_critic: bool) -> None:
    """ThreestepError where a prompt with its response may be longer than a model's positions; nothing is loaded."""
    longest = data.max_prompt_seq_len + ppo.max_answer_seq_len
    models = [roles.actor_model(), *([roles.critic_model()] if with_critic else [])]
    for model in models:
        check_positions(model, longest, "--max_prompt_seq_len and --max_answer_seq_len together")


def load_tokenizers(roles: RolesArguments, data: DataArguments, with_critic: bool = True) -> Tokenizers:
    """Load both; ThreestepError where actor and reward model would read different texts from the same ids.
    with_critic: False where nothing is loaded from the critic's path."""
    trusted = roles.trust_remote_code
    actor = load_tokenizer(roles.actor_model_name_or_path, roles.pad_token, trust_remote_code=trusted)
    actor = use_chat_template(actor, data)
    if not with_critic:
        return Tokenizers(actor, None)
    critic = load_tokenizer(roles.critic_model_name_or_path, roles.pad_token, trust_remote_code=trusted)
    critic = use_chat_template(critic, data)
    if not same_tokenizer(actor, critic):
        raise ThreestepError(
            f"the tokenizers of --actor_model_name_or_path '{roles.actor_model_name_or_path}' ({len(actor)} tokens) "
            f"and --critic_model_name_or_path '{roles.critic_model_name_or_path}' ({len(critic)} tokens) differ: the "
            "reward model would read other words than the actor wrote; train step 2 from a model with the actor's "
            "tokenizer"
        )
    return Tokenizers(actor, critic)


def chosen_scale(roles: RolesArguments, ppo: PpoArguments) -> ScoreScale | None:
    """The scale that scores are put on, read before a model loads; None where they stay as they are."""
    if not ppo.normalize_reward_scores:
        return None
    return read_score_scale(roles.critic_model_name_or_path, "--normalize_reward_scores")


def load_prompts(
    run: RunArguments,
    data: DataArguments,
    ppo: PpoArguments,
    critic_warmup: int,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    say: Callable[..., None],
) -> Inputs:
    """Build phase 3's prompts and the unsupervised blocks, and count the rollouts that they make."""
    phase = build_phase(3, data, tokenizer, run.seed, ranks.is_main, say)
    texts = None
    if data.unsupervised_dataset_name is not None:
        block_length = data.max_prompt_seq_len + ppo.max_answer_seq_len
        texts = build_unsupervised(data, tokenizer, block_length, run.seed, ranks.is_main, say)
    per_rank = ppo.per_device_generation_batch_size * ppo.generation_batches
    rollouts = steps_in(len(phase.train), ppo.num_train_epochs, per_rank * ranks.world_size)
    if ppo.val_only:
        rollouts = 0
    elif rollouts == 0:
        raise ThreestepError(
            f"one rollout takes {per_rank * ranks.world_size} prompts (--per_device_generation_batch_size x "
            f"--generation_batches x {ranks.world_size} ranks) and {ppo.num_train_epochs:g} epochs of "
            f"{len(phase.train)} prompts do not fill one; lower the batch or add prompts or epochs"
        )
    if ppo.max_train_steps is not None:
        rollouts = min(rollouts, ppo.max_train_steps)
    if critic_warmup >= max(rollouts, 1):
        raise ThreestepError(
            f"--critic_warmup {critic_warmup} leaves none of the run's {rollouts} rollouts to train the actor; lower "
            "it or add prompts or epochs"
        )
    steps = ppo.steps_per_rollout
    source = open_prompt_source(
        phase.train,
        ppo.prompt_sampler,
        ppo.prompt_dataset,
        lambda: PromptMaker(data, tokenizer),
        lambda ids: str(tokenizer.decode(ids)),
        end_of_conversation_id(tokenizer, conversation_end(data, tokenizer)),
        run.seed,
        ranks,
    )
    columns = sorted({**phase.report.train.columns, **phase.report.eval.columns})
    data_is = " ".join(part.manifest["fingerprint"] for part in (phase.train, texts) if part is not None)
    return Inputs(
        source,
        phase.eval,
        columns,
        texts,
        rollouts,
        rollouts * steps,
        critic_warmup * steps,
        ranks,
        data_is,
        phase.report,
    )


def role_settings(flags: RolesArguments, names: Names, inputs: Inputs) -> RoleSettings:
    """Which models there are, and how each is loaded and trained."""
    return RoleSettings(
        flags.actor_model(),
        flags.actor_engine(),
        flags.critic_model(),
        flags.critic_engine(),
        with_critic=names.algorithm.estimator.needs_critic,
        with_reference=names.algorithm.wants_reference,
        with_reward_model=names.with_reward_model,
        warmup_steps=inputs.warmup_steps,
        offload_reference=flags.offload_reference_model,
        offload_reward_model=flags.offload_reward_model,
        ema_decay=flags.ema_decay if flags.enable_ema else None,
        share_trunk=flags.share_trunk,
    )


def make_parts(
    roles: Roles,
    names: Names,
    inputs: Inputs,
    tokenizer: PreTrainedTokenizerBase,
    scale: ScoreScale | None,
    run: RunArguments,
    data: DataArguments,
    ppo: PpoArguments,
    reward_flags: RewardArguments,
    vllm: VllmArguments,
    metrics: MetricsWriter,
    folder: RunFolder,
    say: Callable[..., None],
) -> tuple[RolloutEngine, Evaluator, PpoSettings]:
    """Return what the trainer works with besides the models and the data."""
    longest = data.max_prompt_seq_len + ppo.max_answer_seq_len
    read = [(roles.actor_model, lambda rows: roles.actor(rows).logprobs_M)]
    if roles.scorer is not None and roles.reward_model is not None:
        read.append((roles.scorer, roles.reward_model))
    elif roles.critic_model is not None and roles.critic is not None:
        critic = roles.critic
        read.append((roles.critic_model, lambda rows: critic(rows, at="targets")))
    packed = all(may_pack(ppo.padded, model, roles.actor, own, longest, say) for model, own in read)
    plan = _plan(ppo, longest, roles.actor_model, packed, inputs.ranks.world_size)
    meters = _meters(roles, inputs.ranks) if ppo.report_mfu and inputs.total_rollouts else ()
    settings = _settings(inputs, tokenizer, scale, run, data, ppo, reward_flags, names, plan, meters)
    kind = names.rollout_engine
    engine = make_engine(
        partial(kind, flags=vllm, longest_tokens=longest) if kind is VllmRollout else kind,
        lambda ids: str(tokenizer.decode(list(ids))),
        ppo.rollout_dump,
        ppo.rollout_replay,
        inputs.ranks.rank,
    )
    evaluator = Evaluator(
        roles=roles,
        rollout_engine=engine,
        prompts=inputs.eval,
        tokenizer=tokenizer,
        checker=names.checker,
        sampling=settings.sampling,
        experience=settings.experience,
        prompts_per_batch=ppo.per_device_eval_batch_size,
        seed=run.seed,
        metrics=metrics,
        folder=folder,
        columns=inputs.columns,
        with_greedy=ppo.val_greedy,
        shown=ppo.show_samples,
    )
    return engine, evaluator, settings


def _plan(ppo: PpoArguments, longest_tokens: int, model: PreTrainedModel, packed: bool, ranks: int) -> PlanSettings:
    """How sequences are laid out over all ranks."""
    return plan_for(
        model,
        sequences=ppo.per_device_training_batch_size,
        longest_tokens=longest_tokens,
        packed=packed,
        ranks=ranks,
        max_tokens_per_micro_batch=ppo.max_tokens_per_micro_batch,
    )


def _meters(roles: Roles, ranks: Ranks) -> tuple[ComputeMeter, ...]:
    """Of the actor and of the critic, where there is one. A collective."""
    actor = compute_meter(roles.actor_model, ranks)
    if roles.critic_model is None:
        return (actor,)
    return actor, ComputeMeter(model_shape(roles.critic_model), actor.peak_flops_per_second)


def _settings(
    inputs: Inputs,
    tokenizer: PreTrainedTokenizerBase,
    scale: ScoreScale | None,
    run: RunArguments,
    data: DataArguments,
    ppo: PpoArguments,
    reward_flags: RewardArguments,
    names: Names,
    plan: PlanSettings,
    meters: tuple[ComputeMeter, ...],
) -> PpoSettings:
    algorithm = names.algorithm
    end_token_id = end_of_conversation_id(tokenizer, conversation_end(data, tokenizer))
    sampling = Sampling(
        max_new_tokens=ppo.max_answer_seq_len,
        temperature=ppo.temperature,
        top_k=ppo.top_k,
        top_p=ppo.top_p,
        end_token_id=end_token_id,
        pad_token_id=tokenizer.pad_token_id,
        min_p=ppo.min_p,
        bad_words=tokens_of_words(ppo.bad_words, tokenizer, end_token_id),
        stop=tuple(ppo.stop),
    )
    rewards = Rewards(
        named=names.rewards,
        timeout_seconds=reward_flags.reward_timeout,
        columns=tuple(inputs.columns),
        texts_of=lambda rollout: rollout.texts(tokenizer.decode, end_token_id),
    )
    return PpoSettings(
        total_rollouts=inputs.total_rollouts,
        prompts_per_batch=ppo.per_device_generation_batch_size,
        generation_batches=ppo.generation_batches,
        sequences_per_minibatch=ppo.sequences_per_minibatch,
        ppo_epochs=ppo.ppo_epochs,
        critic_warmup=algorithm.flags.critic_warmup,
        dynamic_sampling_tries=algorithm.flags.dynamic_sampling_tries,
        eval_interval=ppo.eval_interval,
        seed=run.seed,
        sampling=sampling,
        experience=experience_settings(algorithm, ppo, scale, plan, tokenizer.pad_token_id, rewards, inputs.ranks.rank),
        learning=learning_settings(algorithm, ppo),
        evaluates_first=ppo.val_before_train or ppo.val_only,
        stop_kl=algorithm.flags.stop_kl,
        stop_update_kl=algorithm.flags.stop_update_kl,
        meters=meters,
        traces=run.traces(),
    )


def save_roles(roles: Roles, tokenizers: Tokenizers, folder: RunFolder) -> None:
    """Write model/ and, where there are these, critic/ and model_ema/. A collective, and the last thing that is done
    with them: the average takes the place of the actor's weights."""
    for name, engine, model, tokenizer in (
        ("model", roles.actor, roles.actor_model, tokenizers.actor),
        ("critic", roles.critic, roles.critic_model, tokenizers.saved_with(roles.shares_trunk)["critic"]),
        ("model_ema", roles.actor if roles.average else None, roles.actor_model, tokenizers.actor),
    ):
        if name == "model_ema" and roles.average is not None:
            roles.average.put_in_place()
        if engine is not None and model is not None and tokenizer is not None:
            tensors = engine.full_state(model)
            if engine.ranks.is_main:
                save_model(folder.path / name, model, tensors, tokenizer)


def summary_of(result: PpoResult) -> dict[str, Any]:
    """The run's closing figures; the checker's are absent where there was none."""
    before, after = result.before, result.after
    summary: dict[str, Any] = {"reward_after": after.reward}
    if after.checks is not None:
        summary["checker_after"] = after.check
    if before is not None:
        summary["reward_before"] = before.reward
        summary["reward_standard_error"] = standard_error_of_gain(before.scores, after.scores)
    if before is not None and before.checks is not None and after.checks is not None:
        summary["checker_before"] = before.check
        summary["checker_standard_error"] = standard_error_of_gain(before.checks, after.checks)
    return {**summary, "held_out_prompts": len(after.scores), "seconds": result.seconds}


def closing_sentence(summary: dict[str, Any], folder: RunFolder, val_only: bool) -> str:
    """The run in one line."""
    after, seconds = f"{summary['reward_after']:.3f}", summary["seconds"]
    if val_only:
        return f"step 3: mean reward on {summary['held_out_prompts']} held-out prompts {after}; nothing was trained"
    gain = after
    if "reward_before" in summary:
        error = summary["reward_standard_error"]
        gain = f"{summary['reward_before']:.3f} -> {after} (standard error of the gain {error:.3f})"
    return f"step 3: mean reward on held-out prompts {gain} in {seconds:.0f} s; the model is in {folder.model}"
