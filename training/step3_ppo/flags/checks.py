"""Checks of step 3's configuration, before a model loads: what its names select, whether its flags agree, and whether
forwards that read can be learned from (`--reuse_forwards`, `--reuse_values`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from training.step3_ppo.advantages import NO_ADVANTAGE
from training.step3_ppo.contracts.records import NO_CORRECTION
from training.step3_ppo.flags.algorithm import Algorithm, reads_old_policy, selected_algorithm
from training.step3_ppo.flags.roles_arguments import critic_on_trunk
from training.step3_ppo.flags.rollout_choices import (
    RolloutScheduler,
    asked_loop,
    check_loop,
    correction_of,
    scheduler_of,
    source_of,
)
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import either
from training.utils.flags.added import advice, in_place_of_run
from training.utils.flags.flags import AutoChoice
from training.utils.generation.partners import Partners, all_partners, partners_of
from training.utils.generation.table import checked_engine, supporting
from training.utils.loading.configurations import check_positions, check_trains
from training.utils.plugins.registry import check_by_plugins, own_forwards
from training.utils.rewards.table import RULES
from training.utils.rewards.weighted import Reward, check_comparisons, named_rewards, reads_model, rule_named

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.decode_loops import AskedLoop
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.rewards.calling import Rule


class Components(NamedTuple):
    """The selection of the names in the flags."""

    rollout_engine: type[RolloutEngine]
    checker: Rule | None
    algorithm: Algorithm
    rewards: tuple[Reward, ...]
    shares_trunk: bool = False
    loop: AskedLoop | None = None
    partners: Partners = Partners()
    scheduler: RolloutScheduler | None = None

    @property
    def with_reward_model(self) -> bool:
        return reads_model(self.rewards)

    @property
    def rules(self) -> dict[str, Rule]:
        """Return every reward function by its name in errors."""
        rules = {reward.name: reward.rule for reward in self.rewards if reward.rule is not None}
        return rules | ({"--checker": self.checker} if self.checker is not None else {})

    @property
    def with_critic_tokenizer(self) -> bool:
        """Something is loaded from --critic_model_name_or_path."""
        return self.with_reward_model or (self.algorithm.estimator.needs_critic and not self.shares_trunk)


def checked_components(flags: PpoFlags) -> Components:
    """Run every check that needs no model, and return what the names select; ThreestepError, with suggestions, for
    unknown names and for flags that do not go together."""
    ppo, mistakes, partners = flags.ppo, Mistakes(), partners_of(flags.added)
    runs = in_place_of_run(flags.settings) is None
    wanted = {"min_p": ppo.min_p, "bad_words": ppo.bad_words, "stop": ppo.stop}
    loop = asked_loop(flags, mistakes)
    scheduler = scheduler_of(flags)
    wanted |= {} if scheduler is None else scheduler.wanted()
    wanted |= partners.engine_flags
    engine = checked_engine(ppo.rollout_engine, wanted, mistakes, flags.data.form, draws=runs)
    flags.engines.refuse_others(ppo.rollout_engine, mistakes)
    check_loop(loop, ppo.rollout_engine, engine, mistakes)
    checker = mistakes.note(rule_named, ppo.checker, flags.reward, "--checker") if ppo.checker else None
    rewards: tuple[Reward, ...] = ()
    if not flags.needs_no_reward:
        rewards = named_rewards(flags.reward, mistakes, acts=partners.gives_rewards)
    _check_no_advantage(flags, mistakes)
    check_comparisons(rewards, _responses_of_a_prompt(flags), mistakes)
    _check_partners(flags, partners, engine, mistakes)
    algorithm = _checked_algorithm(flags, scheduler, rewards, mistakes)
    check_by_plugins(flags, mistakes)
    mistakes.raise_if_any()
    assert algorithm is not None and engine is not None  # an unknown name was noted as a mistake
    if flags.reward.reward_timeout >= flags.faults.rank_timeout:
        raise ThreestepError(
            f"--reward_timeout {flags.reward.reward_timeout:g} must be less than --rank_timeout "
            f"{flags.faults.rank_timeout:g}, the time ranks wait for a running reward function; lower the first or "
            "raise the second"
        )
    shares_trunk = bool(critic_on_trunk(flags.added))
    return Components(engine, checker, algorithm, rewards, shares_trunk, loop, partners, scheduler)


def _checked_algorithm(
    flags: PpoFlags, scheduler: RolloutScheduler | None, rewards: tuple[Reward, ...], mistakes: Mistakes
) -> Algorithm | None:
    """Return what the names select; None where one is unknown. Note flags that do not go with it."""
    correction = mistakes.note(correction_of, flags) or NO_CORRECTION
    algorithm = selected_algorithm(flags.algorithm, flags.ppo, mistakes, correction=correction)
    if algorithm is not None:
        _check_critic(flags, algorithm, rewards, mistakes)
        check_reuse(flags, algorithm, mistakes)
        if scheduler is not None:
            scheduler.check(algorithm, mistakes)
    return algorithm


def _check_no_advantage(flags: PpoFlags, mistakes: Mistakes) -> None:
    """Note that nothing is left to learn from, or what does nothing, where the actor has no advantages."""
    algorithm = flags.algorithm
    if algorithm.advantage != NO_ADVANTAGE:
        return
    ways = "".join(f"{each}, or " for each in advice("no_own_loss"))
    mistakes.require(
        flags.guests.trains_alone,
        f"--advantage {NO_ADVANTAGE} trains the actor only on a teacher's output, but there is no teacher; "
        f"{ways}use another --advantage",
    )
    mistakes.require(
        algorithm.kl_coef == 0 or algorithm.kl_in == "loss",
        f"--kl_coef {algorithm.kl_coef:g} in the reward has no effect with --advantage {NO_ADVANTAGE}; use "
        "--kl_coef 0 or --kl_in loss",
    )


def _responses_of_a_prompt(flags: PpoFlags) -> dict[str, int]:
    """Return the responses to each prompt that are scored together, by the flag."""
    ppo, found = flags.ppo, dict[str, int]()
    if not ppo.val_only:
        found[f"--num_samples_per_prompt {ppo.num_samples_per_prompt}"] = ppo.num_samples_per_prompt
    if flags.data.split.eval_fraction:
        found[f"--val_samples {ppo.val_samples}"] = ppo.val_samples
    if ppo.val_greedy:
        found["--val_greedy"] = 1
    if flags.algorithm.advantage == "remax":
        found["--advantage remax"] = 1
    return found


def _check_partners(
    flags: PpoFlags, partners: Partners, engine: type[RolloutEngine] | None, mistakes: Mistakes
) -> None:
    """Load those who answer the model, unless a replay has their answers. Note what they, and the engine, cannot go
    with."""
    for each in all_partners(flags.added):
        each.check(mistakes)
    if engine is not None:
        mistakes.sentences += engine.refusals(flags.settings_of_engine(engine), partners.drawing)
    if partners.is_there and source_of(flags).draws:
        partners.load(mistakes)


def _check_critic(flags: PpoFlags, algorithm: Algorithm, rewards: tuple[Reward, ...], mistakes: Mistakes) -> None:
    roles, ppo, advantage = flags.roles, flags.ppo, algorithm.flags.advantage
    has_critic = algorithm.estimator.needs_critic and not critic_on_trunk(flags.added)
    if not roles.critic_model_name_or_path and reads_model(rewards):
        also = f", from which the critic of --advantage {advantage} also starts" if has_critic else ""
        mistakes.add(
            f"no reward is set; set --reward to your function (FILE.py:NAME) or a name ({', '.join(RULES)}), or set "
            f"--critic_model_name_or_path to a reward model (step 2's folder or a hub name){also}"
        )
    mistakes.require(
        bool(roles.critic_model_name_or_path) or reads_model(rewards) or not has_critic,
        f"--advantage {advantage} needs a critic, but --critic_model_name_or_path is not set; set it to step 2's "
        "model (a folder or a hub name), or use an --advantage without a critic, such as grpo",
    )
    mistakes.require(
        reads_model(rewards) or not ppo.normalize_reward_scores,
        "--normalize_reward_scores needs a reward model, but --reward uses none; remove --normalize_reward_scores",
    )


def check_beside_media(flags: PpoFlags, components: Components, images: RunMedia | None) -> None:
    """Raise ThreestepError for flags that do not support prompts with images. images: of the prompts, if any."""
    if images is None:
        return
    mistakes, engine, ppo, form = Mistakes(), components.rollout_engine, flags.ppo, flags.data.form
    loop = components.loop
    mistakes.require(
        engine.supports_media or not source_of(flags).draws,
        f"--rollout_engine {ppo.rollout_engine} does not support images, but some prompts have them; use "
        f"{either(supporting('media'))}",
    )
    others = {
        **({} if loop is None else {f"{loop.name} {loop.value}": (bool(loop.why_texts_alone), loop.why_texts_alone)}),
        **({} if form is None else {form.flag: (True, form.beside_media)}),
        components.partners.flag: (
            components.partners.is_there,
            "rewrites the prompts of conversations without their images",
        ),
    }
    for name, (given, why) in others.items():
        mistakes.require(not given, f"{name} does not work with prompts that have images: it {why}; remove it")
    flags.guests.check_media(mistakes)
    mistakes.raise_if_any()


def check_models(flags: PpoFlags, with_critic: bool) -> None:
    """ThreestepError if a prompt with its response may exceed a model's positions, or if a model is stored in a form
    that cannot be trained; nothing is loaded."""
    for role in ("actor", "critic") if with_critic else ("actor",):
        model = flags.model(role)
        check_positions(model, flags.longest_tokens, "--max_prompt_seq_len and --max_answer_seq_len together")
        check_trains(model, generates=role == "actor")


FORWARDS, VALUES = "reuse_forwards", "reuse_values"
ROLES = {VALUES: "critic", FORWARDS: "actor"}  # whose forwards the flag is about


def _obstacles(name: str, flags: PpoFlags, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """Yield what keeps forwards that read from learning too, as a sentence after the flag's name, and what to do. name:
    FORWARDS or VALUES."""
    flag, advantage = f"{ROLES[name]}_dropout", algorithm.flags.advantage
    rate = getattr(flags.roles, flag)
    if rate:  # None: the model's own, which is judged once it is loaded
        why = f"reads and learns in one forward, but --{flag} {rate} would change the log-probabilities and values "
        yield why + "that it reads", f"set --{flag} 0"
    if name == FORWARDS:
        # Several forwards before the first backward: silently wrong gradients under ZeRO-3 (deepspeed 0.19).
        if flags.roles.actor_zero_stage == 3:
            why = "keeps forwards, but --actor_zero_stage 3 releases their weights"
            yield why, "use stage 2 or less, or remove --reuse_forwards"
        if algorithm.flags.kl_in == "loss" and algorithm.kl_estimator.of_logits:
            why = f"would keep all logits of a rollout for --kl_estimator {algorithm.flags.kl_estimator} in the loss"
            yield why, "remove one of them, or use --kl_in reward"
        yield from flags.guests.reuse_obstacles()
    elif not algorithm.estimator.needs_critic:
        yield f"needs a critic, but --advantage {advantage} has none", "remove it"
    elif not algorithm.estimator.returns_alone:
        why = (
            f"needs returns that follow from a response's own rewards and values, but --advantage {advantage} does not "
            "declare that"
        )
        yield f"{why} its returns do (returns_alone)", "use gae, or remove --reuse_values"


def check_reuse(flags: PpoFlags, algorithm: Algorithm, mistakes: Mistakes) -> None:
    """Note the reasons why requested forwards cannot be reused."""
    for name in ROLES:
        for why, instead in _obstacles(name, flags, algorithm) if getattr(flags.ppo, name) else ():
            mistakes.add(f"--{name} {why}; {instead}")


def why_apart(name: str, flags: PpoFlags, algorithm: Algorithm) -> str | None:
    """Return why the flag's auto reads and learns in forwards of their own, whatever the memory; None if nothing keeps
    it from reuse. Besides the obstacles that is anything whose numbers were not compared to the bit. name: FORWARDS or
    VALUES."""
    ppo = flags.ppo
    steps, of_rollouts = ppo.steps_per_rollout, ppo.generation_batches
    others = {
        "nothing is trained (--val_only)": ppo.val_only,
        f"a rollout has {steps} optimizer steps": steps != 1,
        f"a step learns from {of_rollouts} rollouts": of_rollouts != 1,
        **dict.fromkeys(own_forwards(flags), True),
        "there is no critic": name == VALUES and not algorithm.estimator.needs_critic,
        "there is no earlier forward to learn from": name == FORWARDS and not reads_old_policy(algorithm, ppo),
    }
    found = [why for why, holds in others.items() if holds]
    return next(iter([*found, *(f"true {why}" for why, _ in _obstacles(name, flags, algorithm))]), None)


def chosen_by_flags(name: str, flags: PpoFlags, algorithm: Algorithm) -> AutoChoice:
    """Return the choice of the flag's auto, regardless of memory. name: FORWARDS or VALUES."""
    why = why_apart(name, flags, algorithm)
    if why is not None:
        return AutoChoice(name, False, why)
    return AutoChoice(name, True, "training can reuse the earlier forwards", off=False)


def with_reuse(flags: PpoFlags, choice: AutoChoice) -> PpoFlags:
    """Return the flags with --reuse_forwards or --reuse_values as chosen."""
    return flags._replace(ppo=replace(flags.ppo, **{choice.name: choice.value}))
