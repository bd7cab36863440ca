"""The flags of step 3's rollouts, updates and algorithm. Cheap to import for `--help`. Sources of the defaults:
docs/reference/equations.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.step3_ppo.advantages import ESTIMATORS, WITH_CRITIC
from training.step3_ppo.kl import DEFAULT_KL_ESTIMATORS, KL_ESTIMATORS
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import either, entry_named, is_address
from training.utils.engine.config.arguments import EngineArguments, check_epochs
from training.utils.flags.added import flags_of_entries, refuse_flags_of_others
from training.utils.flags.flags import AutoChoice, flag, flag_of
from training.utils.generation.arguments import EvaluationArguments, PromptSamplesArguments, SamplingArguments
from training.utils.generation.table import ENGINES_HELP
from training.utils.plugins.objectives import Estimator
from training.utils.rewards.arguments import CheckerArguments

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes
    from training.utils.plugins.objectives import PolicyLoss


@dataclass
class PpoArguments:
    """Rollouts, rewards and updates."""

    topic: ClassVar[str] = "rollout"

    per_device_generation_batch_size: int = flag(16, "Prompts per rollout on each rank.", "prompts >= 1", topic="batch")
    num_samples_per_prompt: int = flag_of(
        PromptSamplesArguments, "Responses per prompt; default: 8 for grpo and others that compare them, otherwise 1."
    )
    generation_batches: int = flag(
        1, "Rollouts per rank between two updates; raised if one minibatch needs more.", "rollouts >= 1", topic="batch"
    )
    per_device_training_batch_size: int = flag(
        16, "Maximum sequences per forward pass on each rank during updates.", "sequences >= 1", topic="batch"
    )
    gradient_accumulation_steps: int = flag_of(
        EngineArguments, "A minibatch has training batch size x ranks x this many sequences."
    )
    max_tokens_per_micro_batch: int | None = flag_of(EngineArguments)
    padded: bool = flag_of(EngineArguments)
    share_beginnings: int = flag_of(
        EngineArguments,
        "Minimum length in tokens of a common prefix that is computed once per minibatch, such as shared turns or "
        "prompts that begin alike; 0: share only whole prompts, among their samples. The gradient does not change.",
        default=64,
        takes_auto=False,
    )
    num_train_epochs: float = flag_of(
        EngineArguments, "Passes over the prompts; inf continues until --max_train_steps."
    )
    max_train_steps: int | None = flag_of(
        EngineArguments, "Stop after this many rollouts and their updates; default: no limit.", takes="rollouts >= 1"
    )
    ppo_epochs: int = flag(1, "Passes over the minibatches of each rollout.", "passes >= 1", topic="batch")
    reuse_forwards: bool | None = flag(
        None,
        "With one optimizer step per rollout: train the actor on the forward passes that computed log-probabilities, "
        "keeping their activations until then. Faster, with the same numbers, but needs more memory. auto: on if it "
        "saves a pass and fits in free memory (on a CPU: at most twice the memory; docs/reference/equations.md).",
        topic="memory",
        takes_auto=True,
    )
    reuse_values: bool | None = flag(
        None,
        "With one optimizer step per rollout: train the critic on each forward pass that computes values, before the "
        "next one. Faster with the same numbers and memory. auto: on if it saves a pass (docs/reference/equations.md).",
        topic="memory",
        takes_auto=True,
    )
    max_answer_seq_len: int = flag_of(
        SamplingArguments, "Maximum length of a response.", name="max_new_tokens", aliases=(), topic="length"
    )
    rollout_engine: str = flag_of(SamplingArguments, f"Engine that generates the responses: {ENGINES_HELP}.")
    temperature: float = flag_of(
        SamplingArguments, "Sampling temperature of the rollouts and of the trained policy.", takes="temperature > 0"
    )
    top_k: int = flag_of(SamplingArguments)
    top_p: float = flag_of(SamplingArguments)
    min_p: float = flag_of(SamplingArguments)
    stop: list[str] = flag([], "Strings that end a response; they stay in the response.", "text")
    bad_words: list[str] = flag([], "Strings that are never generated.", "text")
    normalize_reward_scores: bool = flag(
        False,
        "Before clipping, normalize scores to (score - mean) / standard deviation, with the values that step 2 stored "
        "in the reward model's configuration.",
        topic="reward",
    )
    clip_reward: float = flag(
        5.0, "Clip the reward model's scores to plus or minus this value.", "score > 0", topic="reward"
    )
    eval_interval: int = flag_of(
        EngineArguments,
        "Rollouts between evaluations; 0: only after training (and before it; see --val_before_train).",
        default=0,
        takes="rollouts >= 0",
    )
    eval_epochs: float = flag_of(EngineArguments)
    val_before_train: bool = flag(True, "Also evaluate before training.", topic="evaluation")
    val_only: bool = flag(False, "Evaluate only; train and save nothing.", topic="evaluation")
    val_greedy: bool = flag(
        False, "Also evaluate greedy responses (eval_greedy/... in the metrics).", topic="evaluation"
    )
    val_samples: int = flag_of(
        EvaluationArguments,
        "Responses per held-out prompt; above 1, metrics also report the best, worst and majority of k "
        "(eval/NAME_best@k; with rewards of 0 and 1, this is pass@k).",
    )
    show_samples: int = flag(
        1, "At each evaluation, print this many prompts with responses and rewards.", "samples >= 0", topic="evaluation"
    )
    report_variance: bool = flag(
        False,
        "Report proxies for the gradient's variance, computed from the rollout policy's distributions.",
        topic="log",
    )
    report_mfu: bool = flag_of(
        EngineArguments, "Report train/mfu, the share of this machine's measured matmul rate that updates achieve."
    )
    per_device_eval_batch_size: int = flag_of(
        EngineArguments, "Prompts per evaluation rollout on each rank.", default=64, takes="prompts >= 1"
    )
    checker: str | None = flag_of(CheckerArguments)

    @staticmethod
    def defaults_beside(values: Mapping[str, Any]) -> list[AutoChoice]:
        """The default where the estimator compares a prompt's samples, as a user's own without a critic may."""
        name: str = values["advantage"]
        try:
            own = entry_named("--advantage", name, ESTIMATORS, Estimator)
        except ThreestepError:  # said where the algorithm is looked up
            return []
        compares = own.needs_groups or (is_address(name) and not own.needs_critic)
        why = f"--advantage {name} {'compares' if own.needs_groups else 'may compare'} the responses to a prompt"
        return [AutoChoice("num_samples_per_prompt", 8, why)] if compares else []

    def __post_init__(self) -> None:
        # DeepSpeed-Chat accumulates gradients over rollouts: a minibatch of several rollouts draws that many.
        rolled_out, minibatch = self.sequences_per_rollout, self.sequences_per_minibatch
        if 0 < rolled_out < minibatch and minibatch % rolled_out == 0:
            self.generation_batches *= minibatch // rolled_out

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        rolled_out, minibatch = self.sequences_per_rollout, self.sequences_per_minibatch
        mistakes.require(
            minibatch >= 1 and rolled_out % max(minibatch, 1) == 0,
            f"each rank generates {rolled_out} sequences (--per_device_generation_batch_size x "
            "--num_samples_per_prompt x --generation_batches), "
            f"which cannot be divided into minibatches of {minibatch} (--per_device_training_batch_size x "
            "--gradient_accumulation_steps); make the first number a multiple of the second",
        )
        check_epochs(mistakes, self)
        steps = self.steps_per_rollout
        for name in ("reuse_forwards", "reuse_values"):
            mistakes.require(
                not getattr(self, name) or (steps == 1 and self.generation_batches == 1),
                f"--{name} needs one optimizer step per rollout, but --ppo_epochs, --generation_batches and "
                f"--per_device_training_batch_size result in other numbers (steps: {steps}, rollouts: "
                f"{self.generation_batches}); change these, or remove --{name}",
            )
        for name in ("stop", "bad_words"):
            mistakes.require("" not in getattr(self, name), f"--{name} expects non-empty text, got ''")

    @property
    def sequences_per_rollout(self) -> int:
        """Sequences of one rank between two updates."""
        return self.per_device_generation_batch_size * self.num_samples_per_prompt * self.generation_batches

    def prompts_of_step(self, world_size: int) -> int:
        """Return the number of prompts that all ranks use between two updates."""
        return self.per_device_generation_batch_size * self.generation_batches * world_size

    @property
    def sequences_per_minibatch(self) -> int:
        """Sequences of one rank in an optimizer step."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.ppo_epochs * (self.sequences_per_rollout // max(self.sequences_per_minibatch, 1))


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
        f"Advantage estimator; only {WITH_CRITIC} trains a critic. One of {', '.join(ESTIMATORS)}, or your own as "
        "FILE.py:NAME.",
        "name",
        topic="advantage",
    )
    gamma: float = flag(1.0, "Discount per token, for gae and reinforce++.", "0 <= factor <= 1", topic="advantage")
    lam: float = flag(0.95, "GAE's lambda.", "0 <= factor <= 1", topic="advantage")
    whiten_advantages: bool | None = flag(
        None, f"Whiten advantages over all ranks; default: on for {_estimators('whitens')} only.", topic="advantage"
    )
    norm_adv_by_std: bool = flag(
        True, "grpo: divide by the group's standard deviation; false: Dr. GRPO.", topic="advantage"
    )
    norm_adv_over: str | None = flag(
        None,
        f"{_estimators('norms')}: divide by the standard deviation of the group, or of the batch (a rollout's "
        "sequences on all ranks); default: group, but none for rloo.",
        choices=NORMS,
        topic="advantage",
    )
    kl_coef: float = flag(0.1, "Weight of the KL to the reference; 0 loads no reference.", "factor >= 0", topic="kl")
    kl_in: str = flag(
        "reward",
        "Where the KL is applied: in each token's reward, or in the loss.",
        choices=tuple(DEFAULT_KL_ESTIMATORS),
        topic="kl",
    )
    kl_estimator: str | None = flag(
        None,
        f"{_kl_estimators(False)}: from the sampled tokens; {_kl_estimators(True)}: the exact sum over the "
        "vocabulary, which keeps in memory the logits of one forward pass of each model; default: "
        + ", ".join(f"{name} in the {place}" for place, name in DEFAULT_KL_ESTIMATORS.items())
        + ".",
        "name",
        topic="kl",
    )
    kl_control: str = flag(
        "fixed",
        "'fixed', or 'adaptive', which adjusts --kl_coef to keep the KL near --kl_target.",
        choices=KL_CONTROLS,
        topic="kl",
    )
    kl_target: float = flag(
        6.0, "Adaptive control: target KL per response, summed over its tokens.", "nats > 0", topic="kl"
    )
    kl_horizon: float = flag(
        10000.0, "Adaptive control: number of responses over which --kl_coef adapts.", "responses > 0", topic="kl"
    )
    stop_kl: float | None = flag(
        None,
        "End training after a rollout whose mean KL to the reference per response exceeds this; default: never.",
        "nats > 0",
        topic="kl",
    )
    stop_update_kl: float | None = flag(
        None,
        "Skip the rest of a rollout's updates after a minibatch whose KL per token from the rollout policy exceeds "
        "this; default: never.",
        "nats > 0",
        topic="kl",
    )
    policy_loss: str = flag("ppo", f"One of {', '.join(POLICY_LOSSES)}, or your own as FILE.py:NAME.", "name")
    loss_aggregation: str | None = flag(
        None, f"{either(AGGREGATIONS)}; default: {_by_loss(lambda loss: loss.aggregation)}."
    )
    clip_range: float | None = flag(
        None,
        "Clip range of the probability ratio in both directions; default: "
        f"{_by_loss(lambda loss: f'{loss.clip_low:g} down and {loss.clip_high:g} up')}.",
        "ratio > 0",
    )
    clip_range_low: float | None = flag(
        None, "Lower clip range of the probability ratio; default: --clip_range.", "ratio > 0"
    )
    clip_range_high: float | None = flag(
        None, "Upper clip range of the probability ratio (clip-higher); default: --clip_range.", "ratio > 0"
    )
    dual_clip: float | None = flag(
        None, "Upper bound on the ratio where the advantage is negative; default: none.", "ratio > 1"
    )
    clip_range_value: float = flag(0.2, "Clip range for how much a value may change in one update.", "number > 0")
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus; 0 disables it.", "factor >= 0")
    critic_warmup: int = flag(0, "Number of initial rollouts that train only the critic.", "rollouts >= 0")
    dynamic_sampling_tries: int = flag(
        0,
        "Replace prompts whose samples all score the same, up to this many times per rollout; 0 keeps them.",
        "tries >= 0",
        topic="rollout",
    )
    missing_eos_penalty: float = flag(
        0.0,
        "Penalty subtracted from the score of a response that was cut off before it ended.",
        "score >= 0",
        topic="reward",
    )
    overlong_buffer_tokens: int = flag(
        0,
        "Number of tokens before --max_answer_seq_len over which a length penalty grows; 0 disables it.",
        "tokens >= 0",
        topic="reward",
    )
    overlong_penalty: float = flag(
        1.0, "Penalty for a response of maximum length (with --overlong_buffer_tokens).", "score >= 0", topic="reward"
    )
    mask_truncated_responses: bool = flag(False, "Exclude truncated responses from the loss.")

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        mistakes.require(
            self.stop_kl is None or self.kl_coef > 0,
            f"--stop_kl {self.stop_kl} needs the KL to the reference, but --kl_coef 0 loads no reference; set "
            "--kl_coef to any value above 0, or remove --stop_kl",
        )
        estimator = ESTIMATORS.get(self.advantage)
        mistakes.require(
            self.norm_adv_over is None or estimator is None or estimator.norms,
            f"--norm_adv_over {self.norm_adv_over} needs --advantage {_estimators('norms')}, got {self.advantage}; "
            "remove --norm_adv_over",
        )
        mistakes.require(
            self.norm_adv_over is None or self.norm_adv_by_std,
            f"--norm_adv_over {self.norm_adv_over} divides by a standard deviation, but --norm_adv_by_std is false; "
            "remove one of them",
        )
        refuse_flags_of_others(ESTIMATORS, (self.advantage,), self, "advantage", mistakes=mistakes)
        refuse_flags_of_others(POLICY_LOSSES, (self.policy_loss,), self, "policy_loss", mistakes=mistakes)
        policy_loss = POLICY_LOSSES.get(self.policy_loss)
        for name in () if policy_loss is None else policy_loss.unread:
            mistakes.require(
                getattr(self, name) is None,
                f"--{name} {getattr(self, name)} has no effect with --policy_loss {self.policy_loss}; remove it",
            )
        mistakes.require(
            not (self.kl_estimator or "").endswith("+") or self.kl_in == "loss",
            f"--kl_estimator {self.kl_estimator} is {(self.kl_estimator or '')[:-1]} with the gradient of k2, but "
            f"the KL in the reward has no gradient; use {(self.kl_estimator or '')[:-1]}, or --kl_in loss",
        )
        mistakes.require(
            self.kl_control == "fixed" or self.kl_coef > 0,
            "--kl_control adaptive multiplies --kl_coef, which is 0 and would stay 0; set --kl_coef above 0",
        )
