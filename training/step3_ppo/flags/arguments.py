"""The flags of step 3's rollouts and updates. Cheap to import for `--help`. Sources of the defaults: docs/ppo.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.engine.config.arguments import EngineArguments, check_epochs
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.arguments import EvaluationArguments, PromptSamplesArguments, SamplingArguments
from training.utils.generation.table import ENGINES_HELP
from training.utils.rewards.arguments import CheckerArguments

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class PpoArguments:
    """Rollouts, rewards and updates."""

    topic: ClassVar[str] = "rollout"

    per_device_generation_batch_size: int = flag(16, "Prompts in one rollout of a rank.", "prompts >= 1", topic="batch")
    num_samples_per_prompt: int = flag_of(PromptSamplesArguments)
    generation_batches: int = flag(
        1, "Rollouts of a rank between two updates; raised to what one minibatch needs.", "rollouts >= 1", topic="batch"
    )
    per_device_training_batch_size: int = flag(
        16, "Maximum sequences in one forward of a rank during updates.", "sequences >= 1", topic="batch"
    )
    gradient_accumulation_steps: int = flag_of(
        EngineArguments, "A minibatch has training batch size x ranks x this many sequences."
    )
    max_tokens_per_micro_batch: int | None = flag_of(EngineArguments)
    padded: bool = flag_of(EngineArguments)
    share_beginnings: int = flag_of(
        EngineArguments,
        "From how many equal tokens on the beginnings of a minibatch's sequences are computed once: turns that "
        "samples of a prompt share, prompts that begin alike; 0: no more than the prompt, which samples share anyway. "
        "The gradient is the same.",
        default=64,
        takes_auto=False,
    )
    num_train_epochs: float = flag_of(EngineArguments, "Passes over the prompts; inf goes on until --max_train_steps.")
    max_train_steps: int | None = flag_of(
        EngineArguments, "Stop after this many rollouts with their updates; default: no limit.", takes="rollouts >= 1"
    )
    ppo_epochs: int = flag(1, "Passes over the minibatches of each rollout.", "passes >= 1", topic="batch")
    reuse_forwards: bool | None = flag(
        None,
        "With one optimizer step per rollout: the actor learns from the forwards that computed log-probabilities,"
        " whose activations are kept until then. The same numbers; faster, more memory. auto: wherever that spares a"
        " forward and the memory that is free holds them; on a CPU to at most twice as much (docs/ppo.md).",
        topic="memory",
        takes_auto=True,
    )
    reuse_values: bool | None = flag(
        None,
        "With one optimizer step per rollout: the critic learns from each forward that computes values before the next"
        " one. The same numbers; faster, no more memory. auto: wherever that spares a forward (docs/ppo.md).",
        topic="memory",
        takes_auto=True,
    )
    max_answer_seq_len: int = flag_of(
        SamplingArguments, "Maximum length of a response.", name="max_new_tokens", aliases=(), topic="length"
    )
    rollout_engine: str = flag_of(SamplingArguments, f"What draws the responses: {ENGINES_HELP}.")
    temperature: float = flag_of(
        SamplingArguments,
        "Sampling temperature of rollouts, and of the policy that is trained.",
        takes="temperature > 0",
    )
    top_k: int = flag_of(SamplingArguments)
    top_p: float = flag_of(SamplingArguments)
    min_p: float = flag_of(SamplingArguments)
    stop: list[str] = flag([], "Texts that end a response; the response keeps them.", "text")
    bad_words: list[str] = flag([], "Texts that are never drawn.", "text")
    normalize_reward_scores: bool = flag(
        False,
        "Before clipping, scores become (score - mean) / standard deviation, with the constants that step 2 "
        "stored in the reward model's configuration.",
        topic="reward",
    )
    clip_reward: float = flag(
        5.0, "Clip the reward model's scores to this range on both sides of 0.", "score > 0", topic="reward"
    )
    eval_interval: int = flag_of(
        EngineArguments,
        "Rollouts between evaluations; 0: only after training (and before, see --val_before_train).",
        default=0,
        takes="rollouts >= 0",
    )
    eval_epochs: float = flag_of(EngineArguments)
    val_before_train: bool = flag(True, "Also evaluate before training.", topic="evaluation")
    val_only: bool = flag(False, "Evaluate only; train and save nothing.", topic="evaluation")
    val_greedy: bool = flag(
        False, "Also evaluate greedy responses, as eval_greedy/... in the metrics.", topic="evaluation"
    )
    val_samples: int = flag_of(
        EvaluationArguments,
        "Responses to each held-out prompt; above 1 the metrics also have best, worst and majority of k of them "
        "(eval/NAME_best@k; of rewards 0 and 1 that is pass@k).",
    )
    show_samples: int = flag(
        1, "Print this many prompts with responses and rewards at each evaluation.", "samples >= 0", topic="evaluation"
    )
    report_variance: bool = flag(
        False,
        "Report proxies of the gradient's variance, from the distributions of the policy that rolled out.",
        topic="log",
    )
    report_mfu: bool = flag_of(
        EngineArguments,
        "Report train/mfu of the updates: the share of this machine's measured matmul rate that they reach.",
    )
    per_device_eval_batch_size: int = flag_of(
        EngineArguments, "Prompts in one evaluation rollout of a rank.", default=64, takes="prompts >= 1"
    )
    checker: str | None = flag_of(CheckerArguments)

    def __post_init__(self) -> None:
        # DeepSpeed-Chat accumulates gradients over rollouts: a minibatch of several rollouts draws that many.
        rolled_out, minibatch = self.sequences_per_rollout, self.sequences_per_minibatch
        if 0 < rolled_out < minibatch and minibatch % rolled_out == 0:
            self.generation_batches *= minibatch // rolled_out

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        rolled_out, minibatch = self.sequences_per_rollout, self.sequences_per_minibatch
        mistakes.require(
            minibatch >= 1 and rolled_out % max(minibatch, 1) == 0,
            f"each rank rolls out {rolled_out} sequences (--per_device_generation_batch_size x "
            "--num_samples_per_prompt x --generation_batches), "
            f"which does not divide into minibatches of {minibatch} (--per_device_training_batch_size x "
            "--gradient_accumulation_steps); make the first a multiple of the second",
        )
        check_epochs(mistakes, self)
        steps = self.steps_per_rollout
        for name in ("reuse_forwards", "reuse_values"):
            mistakes.require(
                not getattr(self, name) or (steps == 1 and self.generation_batches == 1),
                f"--{name} learns once from each rollout's forwards, and --ppo_epochs, --generation_batches and "
                f"--per_device_training_batch_size make {steps} optimizer steps of {self.generation_batches} rollouts; "
                "make it one of one, or leave it out",
            )
        for name in ("stop", "bad_words"):
            mistakes.require("" not in getattr(self, name), f"--{name} expects texts of a character or more, got ''")

    @property
    def sequences_per_rollout(self) -> int:
        """Sequences of one rank between two updates."""
        return self.per_device_generation_batch_size * self.num_samples_per_prompt * self.generation_batches

    @property
    def sequences_per_minibatch(self) -> int:
        """Sequences of one rank in an optimizer step."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.ppo_epochs * (self.sequences_per_rollout // max(self.sequences_per_minibatch, 1))
