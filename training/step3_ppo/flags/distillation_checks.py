"""Checks of a teacher beside step 3's other flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages import NO_ADVANTAGE
from training.utils.distillation.settings import MODEL_FLAG, URL_FLAG

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes


def check_distillation(flags: PpoFlags, mistakes: Mistakes) -> None:
    """Note what does not go with a teacher, or with no other loss than its own."""
    algorithm, teacher = flags.algorithm, flags.guests.teacher
    if algorithm.advantage == NO_ADVANTAGE:
        mistakes.require(
            teacher.is_there,
            f"--advantage {NO_ADVANTAGE} leaves the actor to a teacher, and there is none; give "
            f"{MODEL_FLAG}, or another --advantage",
        )
        mistakes.require(
            algorithm.kl_coef == 0 or algorithm.kl_in == "loss",
            f"--kl_coef {algorithm.kl_coef:g} in the reward does nothing with --advantage {NO_ADVANTAGE}; give "
            "--kl_coef 0, or --kl_in loss",
        )
    if not teacher.is_there:
        return
    mistakes.require(
        teacher.url is None or flags.ppo.temperature == 1.0,
        f"{URL_FLAG} gives probabilities at temperature 1, and --temperature is {flags.ppo.temperature:g}; give 1, or "
        f"{MODEL_FLAG}",
    )
    others = {
        "--mask_truncated_responses": (
            algorithm.mask_truncated_responses,
            "leaves responses out of the loss, and a teacher is compared on every token that was drawn",
        ),
        "--parallel_thinking": (flags.data.chat.parallel_thinking, "inserts tags that the teacher was not trained on"),
    }
    for name, (given, why) in others.items():
        mistakes.require(not given, f"{name} {why}; leave it or {teacher.flag} out")
