"""The same step under another rule: from its record, with the same samples, weights and moments of the optimizer.

The advantages, losses and denominators are those of the judge's references (threestep/plugins/audit/README.md), the
gradient is of the recorded model in float64, and AdamW goes on from the recorded moments. S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.quantities import QUANTITIES
from threestep.plugins.audit.quantities.step import with_implied
from threestep.plugins.audit.words import settings_of_words
from threestep.plugins.explain.forward.model import read_sequences
from threestep.plugins.explain.shares import model_of, slopes_of
from threestep.plugins.explain.updates import Update, Whole, cosine, dot, update_of
from training.utils.base.errors import ThreestepError, nearest_names

if TYPE_CHECKING:
    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.explain.forward.model import Reads

# Settings by which a step may be another with the same samples; others decided what was drawn or read.
_OF_ROLLOUT = (
    *("advantage", "gamma", "lam", "norm_by", "std_ddof", "std_epsilon", "whiten", "zero_tail"),
    *("mismatch_correction", "mismatch_level", "mismatch_threshold", "mismatch_threshold_lower", "mismatch_normalize"),
)
_OF_KL = ("kl_estimator", "kl_in", "kl_coef")
RULES = (
    *_OF_ROLLOUT,
    *_OF_KL,
    *("kl_gradient", "kl_bound", "kl_weighted"),
    *("policy_loss", "clip_low", "clip_high", "dual_clip", "sapo_tau_pos", "sapo_tau_neg", "entropy_coef"),
    *("kl_cov_coef", "cov_share", "reduction", "longest_tokens", "z_loss_coef"),
    *("preference_loss", "preference_terms", "beta", "simpo_gamma", "cpo_alpha", "ld_alpha", "label_smoothing"),
    *("desirable_weight", "undesirable_weight", "margin_scale", "center_coef", "max_grad_norm", "weight_decay"),
)
# What follows from the rollout, in the order in which it is made.
_CHAIN = (
    "rollout_corrections",
    "rollout_rewards",
    "rollout_advantages",
    "rollout_returns",
    "advantages",
    "corrections",
    "returns",
)
# What a policy's loss has by default in a run: reduction, lower and upper bound (training.step3_ppo.losses).
_OF_LOSSES = {
    "gspo": ("sequence mean", 3e-4, 4e-4),
    "cispo": ("token mean", 1.0, 4.0),
    "geo_mean": ("sequence mean", 0.4, 0.4),
    "sapo": ("sequence mean", 0.2, 0.2),
}
_OF_OTHER_LOSSES = ("token mean", 0.2, 0.2)


@dataclass(frozen=True)
class OtherRule:
    """name: as it was said. settings: in place of the record's. without: rows, or responses of a rollout, that are
    left out of the loss. mask_T: bool, the tokens that carry loss in place of the record's. ran: the record of the step
    as the run's program made it under the rule; None: it is made from the record of the real step."""

    name: str
    settings: Mapping[str, Any]
    without: tuple[int, ...] = ()
    mask_T: np.ndarray | None = None
    ran: AuditedStep | None = None


@dataclass(frozen=True)
class Counterfactual:
    """cosine: of the updates, by this rule and by the real one. size: the length of this rule's update over the real
    one's. gradient_cosine: of the gradients. turned_T: bool, tokens that are pushed the other way. slopes: by this
    rule. gradients, update: by this rule."""

    rule: OtherRule
    cosine: float
    size: float
    gradient_cosine: float
    turned_T: np.ndarray
    gradients: Whole
    slopes: Reads
    update: Update


def rule_of(said: str, objective: str) -> OtherRule:
    """Read the words of --with: NAME=VALUE with spaces or commas between, `loss` for the objective's loss."""
    settings = said_settings(said, objective)
    settings = with_implied(settings)
    if "policy_loss" in settings:
        reduction, low, high = _OF_LOSSES.get(settings["policy_loss"], _OF_OTHER_LOSSES)
        settings = {"reduction": reduction, "clip_low": low, "clip_high": high, **settings}
    return OtherRule(said, settings)


def said_settings(said: str, objective: str) -> dict[str, Any]:
    """The settings of a record that are named. ThreestepError for those that decide what was drawn or read."""
    own = {"loss": "policy_loss" if objective == "policy" else "preference_loss"}
    parts = [part for part in said.replace(",", " ").split() if part]
    named = []
    for part in parts:
        name, equals, value = part.partition("=")
        name = own.get(name, name)
        if not equals or name not in RULES:
            raise ThreestepError(
                f"--with expects loss settings as NAME=VALUE, got '{part}'{nearest_names(name, [*RULES, *own])}; "
                "threestep/plugins/explain/README.md lists them"
            )
        named.append(f"{name}={value.replace('_', ' ') if name == 'reduction' else value}")
    return settings_of_words(",".join(named))


def under(step: AuditedStep, rule: OtherRule) -> AuditedStep:
    """The step as it would have been. LackingError for a rule that needs what the record lacks."""
    found = step.under(rule.settings)
    if step.head.objective == "policy" and _changes_rollout(step, rule):
        for quantity in (each for name in _CHAIN for each in QUANTITIES if each.name == name):
            made = quantity.name in ("corrections", "rollout_corrections") and "mismatch_correction" in rule.settings
            if step.has(quantity.name) or made:
                found = found.replaced(**{quantity.name: quantity.compute(found)})
    if rule.mask_T is not None:
        found = found.replaced(loss_mask=rule.mask_T & step.real_T & (step.place_T > 0))
    return _without(found, rule.without) if rule.without else found


def _changes_rollout(step: AuditedStep, rule: OtherRule) -> bool:
    """True if advantages, rewards or corrections are others: a KL in the loss changes none of them."""
    kl_in = (step.settings.get("kl_in"), rule.settings.get("kl_in"))
    return any(name in _OF_ROLLOUT or (name in _OF_KL and "reward" in kl_in) for name in rule.settings)


def _without(step: AuditedStep, rows: Sequence[int]) -> AuditedStep:
    """Leave rows out of the loss, and of its denominator."""
    name = "numbers" if step.head.objective == "policy" else "rows"
    held_S = ~np.isin(step.tensor(name), rows)
    lacking = sorted(set(rows) - set(map(int, step.tensor(name))))
    if lacking:
        raise ThreestepError(
            f"--without_row expects one of the step's {'responses' if name == 'numbers' else 'rows'} "
            f"({', '.join(map(str, sorted(set(map(int, step.tensor(name))))[:8]))}, ...), got {lacking[0]}"
        )
    changes: dict[str, np.ndarray] = {}
    if step.has("loss_mask"):
        changes["loss_mask"] = step.tensor("loss_mask") & held_S[step.sequence_T]
    if step.has("chosen"):
        kept_P = held_S[step.tensor("chosen")]
        weights_P = step.tensor("pair_weights") if step.has("pair_weights") else np.ones(len(kept_P))
        changes["pair_weights"] = weights_P * kept_P
    return step.replaced(**changes)


def counterfactual(step: AuditedStep, real: Update, rule: OtherRule) -> Counterfactual:
    """Return the step under a rule, beside what really happened."""
    slopes, gradients, update = _made(step, rule) if rule.ran is None else _as_it_ran(rule.ran)
    recorded = step.state("gradients.")
    sizes = np.sqrt(dot(update.whole, update.whole) / max(dot(real.whole, real.whole), 1e-300))
    return Counterfactual(
        rule,
        cosine(update.whole, real.whole),
        float(sizes),
        cosine(gradients, recorded),
        _turned(slopes_of(step), slopes),
        gradients,
        slopes,
        update,
    )


def _made(step: AuditedStep, rule: OtherRule) -> tuple[Reads, Whole, Update]:
    other = under(step, rule)
    slopes = slopes_of(other)
    whole = model_of(step).gradient(read_sequences(other), slopes)
    gradients = {name: whole[name] for name in step.state("gradients.")}
    return slopes, gradients, update_of(other, gradients)


def _as_it_ran(ran: AuditedStep) -> tuple[Reads, Whole, Update]:
    return slopes_of(ran), ran.state("gradients."), update_of(ran)


def _turned(real: Reads, other: Reads) -> np.ndarray:
    """Return where the loss pushes the other way: by token, or by sequence of a reward model."""
    if real.scores_S is not None and other.scores_S is not None:
        return real.scores_S * other.scores_S < 0.0
    assert real.logprobs_T is not None and other.logprobs_T is not None
    return real.logprobs_T * other.logprobs_T < 0.0
