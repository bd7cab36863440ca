"""Checks of a teacher beside step 3's other flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages import NO_ADVANTAGE

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes


def check_distillation(flags: PpoFlags, mistakes: Mistakes) -> None:
    """Note what does not go with a teacher, or with no other loss than its own."""
    algorithm, teacher = flags.algorithm, flags.teacher.teacher_model_name_or_path
    if algorithm.advantage == NO_ADVANTAGE:
        mistakes.require(
            teacher is not None,
            f"--advantage {NO_ADVANTAGE} leaves the actor to a teacher, and there is none; give "
            "--teacher_model_name_or_path, or another --advantage",
        )
        mistakes.require(
            algorithm.kl_coef == 0 or algorithm.kl_in == "loss",
            f"--kl_coef {algorithm.kl_coef:g} in the reward does nothing with --advantage {NO_ADVANTAGE}; give "
            "--kl_coef 0, or --kl_in loss",
        )
    if teacher is None:
        return
    others = {
        "--mask_truncated_responses": (
            algorithm.mask_truncated_responses,
            "leaves responses out of the loss, and a teacher is compared on every token that was drawn",
        ),
        "--parallel_thinking": (flags.data.chat.parallel_thinking, "inserts tags that the teacher was not trained on"),
    }
    for name, (given, why) in others.items():
        mistakes.require(not given, f"{name} {why}; leave it or --teacher_model_name_or_path out")
