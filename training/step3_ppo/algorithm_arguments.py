"""The flags of step 3's algorithm: advantages, KL, losses, lengths, mismatch. Cheap to import: `--help` reaches this
module. Defaults' sources: docs/ppo.md."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes

# Where each choice is of one place only; names that stand for parts are looked up in assembly.py.
KL_PLACES = ("reward", "loss")
KL_CONTROLS = ("fixed", "adaptive")
MISMATCH_CORRECTIONS = ("none", "truncate", "mask")
MISMATCH_LEVELS = ("token", "sequence")


@dataclass
class AlgorithmArguments:
    """How advantages are estimated and what is minimised."""

    advantage: str = field(
        default="gae",
        metadata={"help": "Advantage estimator: gae, grpo, grpo_passk, rloo, reinforce++, reinforce++_baseline, remax, "
        "opo or gpg. All but gae train without a critic."},
    )  # fmt: skip
    gamma: float = field(default=1.0, metadata={"help": "Discount, of gae and reinforce++."})
    lam: float = field(default=0.95, metadata={"help": "GAE's lambda."})
    whiten_advantages: bool | None = field(
        default=None,
        metadata={"help": "Mean 0 and variance 1 over all ranks' tokens; default: for gae and both reinforce++."},
    )
    norm_adv_by_std: bool = field(
        default=True,
        metadata={"help": "grpo and grpo_passk: divide by the group's standard deviation; false: Dr. GRPO."},
    )
    kl_coef: float = field(default=0.1, metadata={"help": "Weight of the KL to the reference; 0 loads no reference."})
    kl_in: str = field(default="reward", metadata={"help": "Where the KL goes: reward or loss."})
    kl_estimator: str | None = field(
        default=None,
        metadata={
            "help": "k1, k2, k3 or abs of the drawn tokens, or full, the exact sum over the vocabulary, which "
            "holds the logits of a forward of both models; default: k1 in the reward, k3 in the loss (where k1 pulls "
            "nowhere)."
        },
    )
    kl_control: str = field(
        default="fixed", metadata={"help": "fixed, or adaptive: --kl_coef moves to hold --kl_target."}
    )
    kl_target: float = field(default=6.0, metadata={"help": "Adaptive control: nats a response, summed over tokens."})
    kl_horizon: float = field(default=10000.0, metadata={"help": "Adaptive control: responses of one time constant."})
    stop_kl: float | None = field(
        default=None,
        metadata={"help": "End the training after a rollout whose KL to the reference, nats a response, is above this; "
        "default: never."},
    )  # fmt: skip
    stop_update_kl: float | None = field(
        default=None,
        metadata={"help": "Leave out what is left of a rollout's updates after a minibatch whose KL from the policy "
        "that rolled out, nats a token, is above this; default: never."},
    )  # fmt: skip
    policy_loss: str = field(default="ppo", metadata={"help": "ppo, gspo, cispo, gpg, kl_cov or clip_cov."})
    loss_aggregation: str | None = field(
        default=None,
        metadata={"help": "token-mean, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm; default: "
        "token-mean, with gspo seq-mean-token-mean."},
    )  # fmt: skip
    clip_range: float | None = field(
        default=None,
        metadata={"help": "Clip of the probability ratio, both ways; default 0.2, gspo 0.0003 down and 0.0004 up, "
        "cispo 1 down and 4 up."},
    )  # fmt: skip
    clip_range_low: float | None = field(default=None, metadata={"help": "The same, downwards only."})
    clip_range_high: float | None = field(default=None, metadata={"help": "The same, upwards only (clip-higher)."})
    dual_clip: float | None = field(
        default=None, metadata={"help": "Bound on the ratio where the advantage is negative; above 1; default: none."}
    )
    clip_range_value: float = field(default=0.2, metadata={"help": "Clip of the value's change."})
    cov_share: float = field(default=2e-4, metadata={"help": "kl_cov, clip_cov: share of tokens held back."})
    clip_cov_low: float = field(default=1.0, metadata={"help": "clip_cov: tokens of more covariance than this."})
    clip_cov_high: float = field(default=5.0, metadata={"help": "clip_cov: tokens of less covariance than this."})
    kl_cov_coef: float = field(default=1.0, metadata={"help": "kl_cov: weight of the penalty on its tokens."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    critic_warmup: int = field(default=0, metadata={"help": "First rollouts that train the critic alone."})
    dynamic_sampling_tries: int = field(
        default=0,
        metadata={"help": "Replace prompts whose samples all score the same by further prompts, at most so many times "
        "a rollout."},
    )  # fmt: skip
    missing_eos_penalty: float = field(
        default=0.0, metadata={"help": "Taken off the score of a response that did not end."}
    )
    overlong_buffer_tokens: int = field(
        default=0, metadata={"help": "Soft over-long punishment over the last so many of --max_answer_seq_len tokens."}
    )
    overlong_penalty: float = field(default=1.0, metadata={"help": "The punishment of a response of full length."})
    mask_truncated_responses: bool = field(
        default=False, metadata={"help": "Leave responses that did not end out of the loss."}
    )
    mismatch_correction: str | None = field(
        default=None,
        metadata={"help": "Weigh tokens by p_train / p_rollout: none, truncate at the threshold, or mask outside it; "
        "default: none, with --rollout_engine vllm truncate."},
    )  # fmt: skip
    mismatch_level: str = field(default="token", metadata={"help": "Ratio of each token, or of the sequence."})
    mismatch_threshold: float = field(default=2.0, metadata={"help": "Largest ratio; masks keep down to its inverse."})

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        for flag, choices in (
            ("kl_in", KL_PLACES),
            ("kl_control", KL_CONTROLS),
            ("mismatch_correction", MISMATCH_CORRECTIONS),
            ("mismatch_level", MISMATCH_LEVELS),
        ):
            got = getattr(self, flag)
            if got is not None:
                mistakes.require_one_of(f"--{flag}", got, choices)
        for flag in ("gamma", "lam"):
            got = getattr(self, flag)
            mistakes.require(0 <= got <= 1, f"--{flag} expects a number from 0 to 1, got {got}")
        positive = (
            "clip_range", "clip_range_low", "clip_range_high", "clip_range_value", "kl_target", "kl_horizon", "stop_kl",
            "stop_update_kl",
        )  # fmt: skip
        for flag in positive:
            got = getattr(self, flag)
            mistakes.require(got is None or got > 0, f"--{flag} expects more than 0, got {got}")
        for flag in (
            "kl_coef", "kl_cov_coef", "entropy_coef", "critic_warmup", "dynamic_sampling_tries", "missing_eos_penalty",
            "overlong_buffer_tokens", "overlong_penalty",
        ):  # fmt: skip
            got = getattr(self, flag)
            mistakes.require(got >= 0, f"--{flag} expects 0 or more, got {got}")
        mistakes.require(
            self.stop_kl is None or self.kl_coef > 0,
            f"--stop_kl {self.stop_kl} needs the KL to the reference, and --kl_coef 0 loads none; give a --kl_coef "
            "above 0, however small, or leave --stop_kl out",
        )
        for flag in ("dual_clip", "mismatch_threshold"):
            got = getattr(self, flag)
            mistakes.require(got is None or got > 1, f"--{flag} expects more than 1, got {got}")
        mistakes.require(0 < self.cov_share < 1, f"--cov_share expects a share between 0 and 1, got {self.cov_share}")
        mistakes.require(
            self.clip_cov_low < self.clip_cov_high,
            f"--clip_cov_low expects less than --clip_cov_high {self.clip_cov_high}, got {self.clip_cov_low}",
        )
        mistakes.require(
            self.kl_control == "fixed" or self.kl_coef > 0,
            "--kl_control adaptive multiplies --kl_coef, which is 0 and would stay so; give one to start from",
        )
