"""The flags of step 3's algorithm: advantages, KL, losses, lengths, mismatch. Cheap to import for `--help`. Sources of
the defaults: docs/ppo.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.step3_ppo.advantages import ESTIMATORS, WITH_CRITIC
from training.step3_ppo.kl import DEFAULT_KL_ESTIMATORS, KL_ESTIMATORS
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.utils.base.tables import either
from training.utils.flags.entry_flags import flags_of_entries, refuse_flags_of_others
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes
    from training.utils.plugins.objectives import PolicyLoss

KL_CONTROLS = ("fixed", "adaptive")
NORMS = ("group", "batch")


def _by_loss(shown: Callable[[PolicyLoss], str]) -> str:
    """Return a default that is the policy loss's: the usual one, then the losses with another."""
    usual = shown(POLICY_LOSSES["ppo"])
    others = [f"{shown(loss)} for {name}" for name, loss in POLICY_LOSSES.items() if shown(loss) != usual]
    return ", ".join([usual, *others])


def _estimators(kind: str) -> str:
    return either(name for name, estimator in ESTIMATORS.items() if getattr(estimator, kind))


def _kl_estimators(of_logits: bool) -> str:
    return either(name for name, estimator in KL_ESTIMATORS.items() if estimator.of_logits == of_logits)


@dataclass
class AlgorithmArguments(flags_of_entries(ESTIMATORS), flags_of_entries(POLICY_LOSSES)):  # type: ignore[misc]
    """Advantages and losses."""

    topic: ClassVar[str] = "policy"

    advantage: str = flag(
        "gae",
        f"How advantages are estimated; only {WITH_CRITIC} trains a critic. One of {', '.join(ESTIMATORS)}, or "
        "your own as FILE.py:NAME.",
        "name",
        topic="advantage",
    )
    gamma: float = flag(1.0, "Discount per token, for gae and reinforce++.", "0 <= factor <= 1", topic="advantage")
    lam: float = flag(0.95, "GAE's lambda.", "0 <= factor <= 1", topic="advantage")
    whiten_advantages: bool | None = flag(
        None, f"Whiten advantages over all ranks' tokens; default: for {_estimators('whitens')}.", topic="advantage"
    )
    norm_adv_by_std: bool = flag(
        True, "grpo: divide by the group's standard deviation; false: Dr. GRPO.", topic="advantage"
    )
    norm_adv_over: str | None = flag(
        None,
        f"{_estimators('norms')}: divide by the standard deviation of the group, or of the batch, all ranks' "
        "sequences of a rollout; default: group, for rloo by none.",
        choices=NORMS,
        topic="advantage",
    )
    kl_coef: float = flag(0.1, "Weight of the KL to the reference; 0 loads no reference.", "factor >= 0", topic="kl")
    kl_in: str = flag(
        "reward",
        "Where the KL is applied: in the reward of each token, or in the loss.",
        choices=tuple(DEFAULT_KL_ESTIMATORS),
        topic="kl",
    )
    kl_estimator: str | None = flag(
        None,
        f"{_kl_estimators(False)} from the drawn tokens, or {_kl_estimators(True)}, the exact sum over the "
        "vocabulary, which keeps the logits of one forward of both models; default: "
        + ", ".join(f"{name} in the {place}" for place, name in DEFAULT_KL_ESTIMATORS.items())
        + ".",
        "name",
        topic="kl",
    )
    kl_control: str = flag(
        "fixed",
        "'fixed', or 'adaptive': --kl_coef moves to keep the KL at --kl_target.",
        choices=KL_CONTROLS,
        topic="kl",
    )
    kl_target: float = flag(
        6.0, "Adaptive control: target KL of a response, summed over its tokens.", "nats > 0", topic="kl"
    )
    kl_horizon: float = flag(
        10000.0, "Adaptive control: number of responses over which it adapts.", "responses > 0", topic="kl"
    )
    stop_kl: float | None = flag(
        None,
        "End training after a rollout whose KL to the reference per response exceeds this; default: never.",
        "nats > 0",
        topic="kl",
    )
    stop_update_kl: float | None = flag(
        None,
        "Skip the rest of a rollout's updates after a minibatch whose KL per token from the policy that drew the "
        "rollout exceeds this; default: never.",
        "nats > 0",
        topic="kl",
    )
    policy_loss: str = flag("ppo", f"{', '.join(POLICY_LOSSES)}, or your own as FILE.py:NAME.", "name")
    loss_aggregation: str | None = flag(
        None, f"{either(AGGREGATIONS)}; default: {_by_loss(lambda loss: loss.aggregation)}."
    )
    clip_range: float | None = flag(
        None,
        "Clip of the probability ratio in both directions; default: "
        f"{_by_loss(lambda loss: f'{loss.clip_low:g} down and {loss.clip_high:g} up')}.",
        "ratio > 0",
    )
    clip_range_low: float | None = flag(
        None, "Clip of the probability ratio downwards; default: --clip_range.", "ratio > 0"
    )
    clip_range_high: float | None = flag(
        None, "Clip of the probability ratio upwards (clip-higher); default: --clip_range.", "ratio > 0"
    )
    dual_clip: float | None = flag(
        None, "Upper bound on the ratio where the advantage is negative; default: none.", "ratio > 1"
    )
    clip_range_value: float = flag(0.2, "Clip of the change of a value in an update.", "number > 0")
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus; 0 leaves it out.", "factor >= 0")
    critic_warmup: int = flag(0, "Number of rollouts at the start that train only the critic.", "rollouts >= 0")
    dynamic_sampling_tries: int = flag(
        0,
        "Replace prompts whose samples all score the same, up to this many times per rollout; 0 keeps them.",
        "tries >= 0",
        topic="rollout",
    )
    missing_eos_penalty: float = flag(
        0.0, "Subtracted from the score of a response that was cut before it ended.", "score >= 0", topic="reward"
    )
    overlong_buffer_tokens: int = flag(
        0,
        "Penalise responses gradually over the last tokens before --max_answer_seq_len; 0 does not.",
        "tokens >= 0",
        topic="reward",
    )
    overlong_penalty: float = flag(
        1.0, "Penalty of a response of full length (with --overlong_buffer_tokens).", "score >= 0", topic="reward"
    )
    mask_truncated_responses: bool = flag(False, "Leave responses that were cut before they ended out of the loss.")

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            self.stop_kl is None or self.kl_coef > 0,
            f"--stop_kl {self.stop_kl} needs the KL to the reference, and --kl_coef 0 loads none; give a --kl_coef "
            "above 0, however small, or leave --stop_kl out",
        )
        estimator = ESTIMATORS.get(self.advantage)
        mistakes.require(
            self.norm_adv_over is None or estimator is None or estimator.norms,
            f"--norm_adv_over {self.norm_adv_over} is for --advantage {_estimators('norms')}, and it is "
            f"{self.advantage}; leave it out",
        )
        mistakes.require(
            self.norm_adv_over is None or self.norm_adv_by_std,
            f"--norm_adv_over {self.norm_adv_over} divides by a standard deviation, and --norm_adv_by_std false by "
            "none; leave one of them out",
        )
        refuse_flags_of_others(ESTIMATORS, (self.advantage,), self, "advantage", mistakes=mistakes)
        refuse_flags_of_others(POLICY_LOSSES, (self.policy_loss,), self, "policy_loss", mistakes=mistakes)
        policy_loss = POLICY_LOSSES.get(self.policy_loss)
        for name in () if policy_loss is None else policy_loss.unread:
            mistakes.require(
                getattr(self, name) is None,
                f"--{name} {getattr(self, name)} does nothing with --policy_loss {self.policy_loss}; leave it out",
            )
        mistakes.require(
            not (self.kl_estimator or "").endswith("+") or self.kl_in == "loss",
            f"--kl_estimator {self.kl_estimator} is {(self.kl_estimator or '')[:-1]} with the gradient of k2, and "
            f"--kl_in reward has no gradient; give {(self.kl_estimator or '')[:-1]}, or --kl_in loss",
        )
        mistakes.require(
            self.kl_control == "fixed" or self.kl_coef > 0,
            "--kl_control adaptive multiplies --kl_coef, which is 0 and would stay so; give one to start from",
        )
