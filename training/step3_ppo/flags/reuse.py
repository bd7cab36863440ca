"""`--reuse_forwards`: what keeps a forward that reads from being learned from, and whether that would spare one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from training.step3_ppo.flags.algorithm import reads_old_policy

if TYPE_CHECKING:
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.ppo_flags import PpoFlags


class Obstacle(NamedTuple):
    """why: a sentence after the flag's name. instead: what to do."""

    why: str
    instead: str


def obstacles(flags: PpoFlags, algorithm: Algorithm) -> Iterator[Obstacle]:
    """Yield what keeps forwards that read from learning too."""
    roles = flags.roles
    for flag in ("actor_dropout", "critic_dropout", "lora_dropout"):
        rate = getattr(roles, flag)
        if rate:  # None: the model's own, which is judged once it is loaded
            yield Obstacle(
                f"reads and learns in one forward, and --{flag} {rate} would change the log-probabilities and values "
                "that are read",
                "give 0",
            )
    for flag in ("actor_zero_stage", "critic_zero_stage"):
        # Several forwards before the first backward: silently wrong gradients under ZeRO-3 (deepspeed 0.19).
        if getattr(roles, flag) == 3:
            yield Obstacle(
                f"keeps forwards whose weights ZeRO-3 has released, and --{flag} is 3",
                "give 2 or less, or leave --reuse_forwards out",
            )
    if algorithm.flags.kl_in == "loss" and algorithm.kl_estimator.of_logits:
        yield Obstacle(
            f"would keep all logits of a rollout for --kl_estimator {algorithm.flags.kl_estimator} in the loss",
            "leave one of them out, or give --kl_in reward",
        )
    if flags.mtp.mtp_num_layers:
        yield Obstacle(
            f"learns from forwards that keep no states, and --mtp_num_layers {flags.mtp.mtp_num_layers} reads them",
            "leave one of the two out",
        )


def why_apart(flags: PpoFlags, algorithm: Algorithm) -> str | None:
    """Return why --reuse_forwards auto reads and learns in forwards of their own, whatever the memory; None if nothing
    keeps it from reuse. Besides the obstacles that is anything whose numbers were not compared to the bit."""
    ppo, roles = flags.ppo, flags.roles
    steps, of_rollouts = ppo.steps_per_rollout, ppo.generation_batches
    others = {
        "nothing is trained (--val_only)": ppo.val_only,
        f"a rollout has {steps} optimizer steps": steps != 1,
        f"a step learns from {of_rollouts} rollouts": of_rollouts != 1,
        f"ranks share rows (--sequence_parallel_size {ppo.sequence_parallel_size})": ppo.sequence_parallel_size > 1,
        "actor and critic share a trunk (--share_trunk)": roles.share_trunk,
        "responses have paths side by side (--parallel_thinking)": flags.data.chat.parallel_thinking,
        "steps are recorded (--record_steps, --explain_steps)": any(flags.run.recording.values()),
        "a teacher is read with the forward that learns": flags.guests.teacher.is_there,
        "experts are replayed (--replay_routers)": flags.mismatch.replay_routers != "none",
        "no forward is read that the step could learn from": not (
            algorithm.estimator.needs_critic or reads_old_policy(algorithm, ppo)
        ),
    }
    found = [why for why, holds in others.items() if holds]
    return next(iter([*found, *(f"true {each.why}" for each in obstacles(flags, algorithm))]), None)
