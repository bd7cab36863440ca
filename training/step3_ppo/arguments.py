"""The flags of step 3's rollouts and updates. Cheap to import for `--help`. Sources of the defaults: docs/ppo.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.utils.engine.arguments import EVAL_EPOCHS_HELP, check_epochs
from training.utils.generation.engines import ENGINES_HELP
from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag
from training.utils.run.user_files import check_address


@dataclass
class PpoArguments:
    """Rollouts, rewards and updates."""

    per_device_generation_batch_size: int = flag(16, "Prompts of one rollout of one rank.", least=1)
    num_samples_per_prompt: int = flag(1, "Responses drawn for each prompt.", least=1)
    generation_batches: int = flag(
        1, "Rollouts of one rank between two updates, raised to what one minibatch needs.", least=1
    )
    per_device_training_batch_size: int = flag(16, "Most sequences in one forward of a rank.", least=1)
    gradient_accumulation_steps: int = flag(
        1, "A minibatch is training batch size x ranks x this many sequences, exactly.", least=1
    )
    max_tokens_per_micro_batch: int | None = flag(
        None, "Most tokens in one forward, padding included; default: no bound.", least=1
    )
    least_micro_batches: int = flag(1, "At least this many forwards of a rank in each optimizer step.", least=1)
    micro_batches_multiple_of: int = flag(
        1,
        "Forwards of a rank in each optimizer step: a multiple of this; where sequences are too few, empty ones.",
        least=1,
    )
    padded: bool = flag(False, "One padded sequence per row: the reference that packing is tested against.")
    num_train_epochs: float = flag(1.0, "Passes over the prompts; inf goes on until --max_train_steps.", above=0)
    prompt_sampler: str | None = flag(
        None,
        "FILE.py:NAME of a PromptSampler, which picks the prompts of each rollout and sees its scores; "
        "default: shuffled epochs.",
    )
    prompt_dataset: str | None = flag(
        None, "FILE.py:NAME of a PromptDataset: prompts that may change after each rollout."
    )
    max_train_steps: int | None = flag(None, "Stop after this many rollouts with their updates.", least=1)
    ppo_epochs: int = flag(1, "Passes over each rollout's minibatches.", least=1)
    reuse_forwards: bool = flag(
        False,
        "With one optimizer step per rollout: learn from the forwards that read log-probabilities and "
        "values, keeping their activations until then.",
    )
    max_answer_seq_len: int = flag(256, "Most tokens of a response.", least=1)
    rollout_engine: str = flag("hf", f"What draws the responses: {ENGINES_HELP}.")
    temperature: float = flag(1.0, "Of rollouts and of the trained policy.", above=0)
    top_k: int = flag(0, "Draw from the k likeliest tokens; 0 from all.", least=0)
    top_p: float = flag(1.0, "Draw from the likeliest tokens of this mass; 1 from all.", above=0, most=1)
    min_p: float = flag(
        0.0, "Draw from tokens at least this share as likely as the likeliest; 0 from all.", least=0, most=1
    )
    stop: list[str] = flag([], "Texts that end a response, which keeps them.")
    bad_words: list[str] = flag([], "Texts whose tokens are never drawn one after the other.")
    end_check_tokens: int | None = flag(
        None,
        "Rollouts by hf look after this many tokens which responses have ended, and cut off what was drawn beyond; "
        "default: 8 on a GPU, where each look waits for it, and 1 on a CPU.",
        least=1,
    )
    rollout_dump: str | None = flag(None, "Write every rollout to this folder.")
    rollout_replay: str | None = flag(
        None, "Read the rollouts of --rollout_dump from this folder; nothing is generated."
    )
    normalize_reward_scores: bool = flag(
        False,
        "Before the clip, scores become (score - mean) / std by the constants that step 2 left in the "
        "reward model's configuration.",
    )
    clip_reward: float = flag(5.0, "Clip the reward model's scores to +- this.", above=0)
    unsup_coef: float = flag(27.8, "Weight of the pretraining loss on unsupervised text; 0 only reports it.", least=0)
    eval_interval: int = flag(0, "Also evaluate every N rollouts; always after training.", least=0)
    eval_epochs: float = flag(0.0, EVAL_EPOCHS_HELP, least=0)
    val_before_train: bool = flag(True, "Also evaluate before training.")
    val_only: bool = flag(False, "Evaluate only; train and save nothing.")
    val_greedy: bool = flag(False, "Also evaluate greedy responses: eval_greedy/... in the metrics.")
    val_samples: int = flag(
        1,
        "Responses to each held-out prompt; above 1 also best, worst, majority and pass@k: eval/NAME_best@k.",
        least=1,
    )
    show_samples: int = flag(1, "Print this many prompts with responses and rewards at each evaluation.", least=0)
    report_variance: bool = flag(
        False, "Report proxies of the gradient's variance, from the distributions of the policy that rolled out."
    )
    report_mfu: bool = flag(True, "Report train/mfu of the updates.")
    per_device_eval_batch_size: int = flag(64, "Prompts of one evaluation rollout of a rank.", least=1)
    checker: str | None = flag(
        None,
        "A rule that scores held-out responses and trains nothing: one of --reward's, or your own as FILE.py:NAME.",
    )

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
        mistakes.require(
            not self.reuse_forwards or (steps == 1 and self.generation_batches == 1),
            "--reuse_forwards learns once from each rollout's forwards, and --ppo_epochs, --generation_batches and "
            f"--per_device_training_batch_size make {steps} optimizer steps of {self.generation_batches} rollouts; "
            "make it one of one, or leave it out",
        )
        for name in ("stop", "bad_words"):
            mistakes.require("" not in getattr(self, name), f"--{name} expects texts of a character or more, got ''")
        mistakes.require(
            self.rollout_dump is None or self.rollout_replay is None,
            "--rollout_dump and --rollout_replay exclude each other: a replay draws nothing new",
        )
        if self.rollout_replay is not None:
            mistakes.require(
                bool(list(Path(self.rollout_replay).glob("rollout_*"))),
                f"--rollout_replay expects a folder that --rollout_dump filled, and {self.rollout_replay} has no "
                "rollouts; name another",
            )
        for name in ("prompt_sampler", "prompt_dataset"):
            if getattr(self, name) is not None:
                mistakes.note(check_address, getattr(self, name), f"--{name}")

    @property
    def sequences_per_rollout(self) -> int:
        """Of one rank, between two updates."""
        return self.per_device_generation_batch_size * self.num_samples_per_prompt * self.generation_batches

    @property
    def sequences_per_minibatch(self) -> int:
        """Of one rank."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.ppo_epochs * (self.sequences_per_rollout // max(self.sequences_per_minibatch, 1))
