"""The flags that only direct preference optimization has. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.step2_dpo.loss import BETA_SCHEDULES, LOSSES, BetaSchedule, Objective
from training.utils.base.console import log_on_main
from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.engine.config.arguments import RateArguments
from training.utils.flags.added import advice, flags_of_entries, own_options, refuse_flags_of_others
from training.utils.flags.flags import flag, flag_of
from training.utils.plugins.registry import owner_sentence

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags

REFERENCES = ("cached", "adapter_off")
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclass
class _LossArguments:
    """The rate and the loss; a loss's own flags come next."""

    learning_rate: float = flag_of(RateArguments, "Peak learning rate (Rafailov et al. 2023, app. B).", default=1e-6)
    beta: float = flag(
        0.1,
        "Strength of the pull toward the reference (Rafailov et al. 2023, app. B); 'ipo' regresses to 1/(2 beta).",
        "factor > 0",
    )
    final_beta: float | None = flag(
        None, "Beta at the last optimizer step; --beta_schedule sets the path to it. Default: --beta.", "factor > 0"
    )
    beta_schedule: str = flag("linear", "Schedule from --beta to --final_beta.", choices=BETA_SCHEDULES)
    loss_type: str = flag(
        "sigmoid",
        "One loss, or a weighted sum of several, such as sigmoid:0.8,sft:0.2 (default weight: 1). "
        + "; ".join(f"'{name}' {loss.note}" for name, loss in LOSSES.items())
        + ".",
        "names",
    )


@dataclass
class DpoArguments(flags_of_entries(LOSSES), _LossArguments):  # type: ignore[misc]
    """Direct preference optimization."""

    topic: ClassVar[str] = "loss"

    sft_coef: float = flag(
        0.0,
        "Weight of the chosen response's negative log-likelihood per token (RPO, Pang et al. 2024); 0 disables it.",
        "factor >= 0",
    )
    ld_alpha: float = flag(
        1.0,
        "Weight of a response's tokens beyond the length of the prompt's shortest response (LD-DPO, Liu et al. 2024); "
        "only for losses that sum over tokens.",
        "0 <= share <= 1",
    )
    reference: str = flag(
        "cached",
        "Where the reference's log-probabilities come from: 'cached' computes them once with the initial model and "
        "stores them with the data; 'adapter_off' computes them at each step with the model's adapters disabled.",
        choices=REFERENCES,
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        weights = mistakes.note(weighted_names, self.loss_type)
        if weights is None:
            return
        chosen = [LOSSES[name] for name in weights]
        refuse_flags_of_others(LOSSES, weights, self, "loss_type", mistakes=mistakes)
        mistakes.require(
            not any(loss.is_token_mean for loss in chosen) or self.ld_alpha == 1.0,
            f"--ld_alpha {self.ld_alpha} needs a sum over tokens, but --loss_type {self.loss_type} averages over "
            "tokens; remove --ld_alpha",
        )
        mistakes.require(
            chosen[0].rows == "ranked" or (self.ld_alpha == 1.0 and not self.sft_coef),
            f"--ld_alpha and --sft_coef need several responses per prompt, but --loss_type {self.loss_type} uses one "
            "at a time; remove both flags",
        )
        mistakes.require(
            any(loss.needs_reference for loss in chosen) or self.reference == "cached",
            f"--reference {self.reference} needs a loss with a reference, but --loss_type {self.loss_type} uses none; "
            "remove --reference",
        )


def weighted_names(text: str) -> dict[str, float]:
    """Return the losses of `--loss_type` with their weights. Raises ThreestepError."""
    found: dict[str, float] = {}
    for entry in text.split(","):
        name, colon, written = entry.strip().partition(":")
        if name not in LOSSES:
            near = owner_sentence("preference_losses", name) or nearest_names(name, list(LOSSES))
            raise ThreestepError(f"--loss_type expects one of {', '.join(LOSSES)}, got '{name}'{near}")
        if name in found:
            raise ThreestepError(f"--loss_type expects each loss once, got '{name}' twice in '{text}'; add weights")
        if colon and not (_WEIGHT.fullmatch(written) and float(written) > 0):
            raise ThreestepError(f"--loss_type expects a weight above 0 after '{name}:', got '{written}' in '{text}'")
        found[name] = float(written) if colon else 1.0
    if len({LOSSES[name].rows for name in found}) > 1:
        kinds = ", ".join(f"'{name}' {LOSSES[name].rows}" for name in found)
        raise ThreestepError(f"--loss_type '{text}' mixes kinds of rows ({kinds}); use losses of one kind")
    return found


def needs_reference(dpo: DpoArguments) -> bool:
    """True if a loss compares the policy with the start model."""
    return any(LOSSES[name].needs_reference for name in weighted_names(dpo.loss_type))


def kind_of_rows(dpo: DpoArguments) -> str:
    """Return the kind of rows on which the losses train."""
    return LOSSES[next(iter(weighted_names(dpo.loss_type)))].rows


def objectives_of(dpo: DpoArguments) -> tuple[Objective, ...]:
    """The losses of the flags with their constants; the first is the one whose implicit rewards are reported."""
    weights = weighted_names(dpo.loss_type)
    if dpo.sft_coef:
        weights["sft"] = weights.get("sft", 0.0) + dpo.sft_coef
    return tuple(_objective(name, weight, dpo) for name, weight in weights.items())


def _objective(name: str, weight: float, dpo: DpoArguments) -> Objective:
    loss = LOSSES[name]
    return Objective(loss, dpo.beta, own_options(loss, dpo), weight, dpo.ld_alpha, name)


def schedule_of(dpo: DpoArguments) -> BetaSchedule:
    """Beta by the step."""
    return BetaSchedule(dpo.beta, dpo.beta if dpo.final_beta is None else dpo.final_beta, dpo.beta_schedule)


def check_marks(rows: Sequence[Any], dpo: DpoArguments) -> None:
    """Raise ThreestepError if marked training rows are all good or all bad; log weights that do not balance them."""
    if kind_of_rows(dpo) != "marked":
        return
    marks = [bool(mark) for mark in (rows.values("is_good") if hasattr(rows, "values") else (r.is_good for r in rows))]
    good, bad = sum(marks), len(marks) - sum(marks)
    if not good or not bad:
        raise ThreestepError(
            f"--loss_type {dpo.loss_type} needs good and bad responses, got {good:,} good and {bad:,} bad; check the "
            "label column (--label_column), or train on good responses alone with step 1"
        )
    for one in objectives_of(dpo):
        line = one.loss.mark_advice and one.loss.mark_advice(good, bad, one.options)
        if line:
            log_on_main(line)


def check_reference(flags: OneModelFlags) -> None:
    """Raise ThreestepError if the reference is to be read from a model whose own weights train."""
    if flags.of_step.reference == "adapter_off" and not flags.start.is_own_reference:
        ways = " or ".join(advice("own_reference")) or "a plugin that adds adapters"
        raise ThreestepError(
            f"--reference adapter_off needs {ways}: a model can be its own reference only if its adapters "
            "alone are trained; use --reference cached"
        )
