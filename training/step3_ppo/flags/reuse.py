"""`--reuse_forwards` and `--reuse_values`: what keeps a forward that reads from being learned from, and whether that
would spare one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from training.step3_ppo.flags.algorithm import reads_old_policy
from training.utils.flags.auto import AutoChoice
from training.utils.plugins.registry import own_forwards

if TYPE_CHECKING:
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes

FORWARDS, VALUES = "reuse_forwards", "reuse_values"
ROLES = {VALUES: "critic", FORWARDS: "actor"}  # whose forwards the flag is about
_READ = AutoChoice(FORWARDS, True, "the forwards that read are learned from", off=False)


class Obstacle(NamedTuple):
    """why: a sentence after the flag's name. instead: what to do."""

    why: str
    instead: str


def obstacles(name: str, flags: PpoFlags, algorithm: Algorithm) -> Iterator[Obstacle]:
    """Yield what keeps forwards that read from learning too. name: FORWARDS or VALUES."""
    flag = f"{ROLES[name]}_dropout"
    rate = getattr(flags.roles, flag)
    if rate:  # None: the model's own, which is judged once it is loaded
        yield Obstacle(
            f"reads and learns in one forward, and --{flag} {rate} would change the log-probabilities and values "
            "that are read",
            "give 0",
        )
    yield from _obstacles_of_the_actor(flags, algorithm) if name == FORWARDS else _obstacles_of_the_critic(algorithm)


def _obstacles_of_the_actor(flags: PpoFlags, algorithm: Algorithm) -> Iterator[Obstacle]:
    # Several forwards before the first backward: silently wrong gradients under ZeRO-3 (deepspeed 0.19).
    if flags.roles.actor_zero_stage == 3:
        yield Obstacle(
            "keeps forwards whose weights ZeRO-3 has released, and --actor_zero_stage is 3",
            "give 2 or less, or leave --reuse_forwards out",
        )
    if algorithm.flags.kl_in == "loss" and algorithm.kl_estimator.of_logits:
        yield Obstacle(
            f"would keep all logits of a rollout for --kl_estimator {algorithm.flags.kl_estimator} in the loss",
            "leave one of them out, or give --kl_in reward",
        )
    yield from (Obstacle(*found) for found in flags.guests.reuse_obstacles())


def _obstacles_of_the_critic(algorithm: Algorithm) -> Iterator[Obstacle]:
    if not algorithm.estimator.needs_critic:
        yield Obstacle(f"is about the critic, and --advantage {algorithm.flags.advantage} has none", "leave it out")
    elif not algorithm.estimator.returns_alone:
        yield Obstacle(
            f"learns a response's returns before others are read, and --advantage {algorithm.flags.advantage} does not "
            "say that these follow from its own rewards and values (returns_alone)",
            "give gae, or leave --reuse_values out",
        )


def check_reuse(flags: PpoFlags, algorithm: Algorithm, mistakes: Mistakes) -> None:
    """Add what keeps forwards from learning that were asked to."""
    for name in ROLES:
        for obstacle in obstacles(name, flags, algorithm) if getattr(flags.ppo, name) else ():
            mistakes.add(f"--{name} {obstacle.why}; {obstacle.instead}")


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
        **_nothing_spared(name, flags, algorithm),
    }
    found = [why for why, holds in others.items() if holds]
    return next(iter([*found, *(f"true {each.why}" for each in obstacles(name, flags, algorithm))]), None)


def _nothing_spared(name: str, flags: PpoFlags, algorithm: Algorithm) -> dict[str, bool]:
    if name == VALUES:
        return {"there is no critic": not algorithm.estimator.needs_critic}
    return {"no forward is read that the step could learn from": not reads_old_policy(algorithm, flags.ppo)}


def chosen_by_flags(name: str, flags: PpoFlags, algorithm: Algorithm) -> AutoChoice:
    """Return what the flag's auto stands for, whatever the memory. name: FORWARDS or VALUES."""
    why = why_apart(name, flags, algorithm)
    return _READ._replace(name=name) if why is None else AutoChoice(name, False, why)


def with_reuse(flags: PpoFlags, choice: AutoChoice) -> PpoFlags:
    """Return the flags with --reuse_forwards or --reuse_values as chosen."""
    return flags._replace(ppo=replace(flags.ppo, **{choice.name: choice.value}))
