"""The flags of step 3. Cheap to import: `--help` reaches this module. Defaults' sources: docs/ppo.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from training.step3_ppo.shared_trunk import check_shared_trunk
from training.utils.engine.arguments import SCHEDULES, check_engine_choices, check_lora_learning_rate, check_schedule
from training.utils.engine.settings import EngineSettings
from training.utils.models.arguments import check_dropout, check_lora
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import Mistakes
from training.utils.run.user_files import check_address


@dataclass
class RolesArguments:
    """The four models: actor (and reference, its start), critic (and reward model, its start)."""

    actor_model_name_or_path: str = field(default="", metadata={"help": "Step 1's model: actor and reference."})
    critic_model_name_or_path: str = field(
        default="", metadata={"help": "Step 2's model: critic and reward model; needless where there is neither."}
    )
    pad_token: str | None = field(
        default=None, metadata={"help": "A token of the tokenizer to pad with, where it names none itself."}
    )
    trust_remote_code: bool = field(
        default=ModelSettings.trust_remote_code,
        metadata={"help": "Run Python code that comes with the models or tokenizers: only where you have read it."},
    )
    actor_learning_rate: float = field(default=9.65e-6, metadata={"help": "Peak learning rate of the actor."})
    critic_learning_rate: float = field(default=5e-6, metadata={"help": "Peak learning rate of the critic."})
    actor_lora_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the actor's adapters; default: the actor's."}
    )
    critic_lora_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the critic's adapters; default: the critic's."}
    )
    actor_weight_decay: float = field(default=0.0, metadata={"help": "AdamW's decay on the actor's matrices."})
    critic_weight_decay: float = field(default=0.0, metadata={"help": "AdamW's decay on the critic's matrices."})
    actor_zero_stage: int = field(default=0, metadata={"help": "ZeRO stage of the actor; 3 shards the reference too."})
    critic_zero_stage: int = field(
        default=0, metadata={"help": "ZeRO stage of the critic; 3 shards the reward model too."}
    )
    actor_gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute the actor's activations."})
    critic_gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute the critic's activations."})
    actor_dropout: float | None = field(
        default=0.0, metadata={"help": "Dropout of the actor; with any, the first ratio of an update is not 1."}
    )
    critic_dropout: float | None = field(default=0.0, metadata={"help": "Dropout of the critic."})
    actor_lora_dim: int = field(
        default=0, metadata={"help": "LoRA rank of the actor; its reference is the adapter off."}
    )
    critic_lora_dim: int = field(default=0, metadata={"help": "LoRA rank of the critic."})
    actor_lora_module_name: str = field(default="all-linear", metadata={"help": "As step 1's --lora_module_name."})
    critic_lora_module_name: str = field(default="all-linear", metadata={"help": "As step 1's --lora_module_name."})
    share_trunk: bool = field(
        default=False,
        metadata={
            "help": "With LoRA of both: the critic is adapters and a new scalar head on the actor's frozen trunk, so "
            "that actor, reference and critic take one model's memory."
        },
    )
    lora_alpha: float = field(default=16.0, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    only_optimize_lora: bool = field(default=True, metadata={"help": "With LoRA: freeze every other weight."})
    dtype: str = field(default="bf16", metadata={"help": "fp32, bf16 or fp16 (GPU only)."})
    offload: bool = field(default=False, metadata={"help": "Keep actor's and critic's optimizer state in CPU memory."})
    offload_reference_model: bool = field(
        default=False, metadata={"help": "ZeRO-3: keep the reference's weights in CPU memory."}
    )
    offload_reward_model: bool = field(
        default=False, metadata={"help": "ZeRO-3: keep the reward model's weights in CPU memory."}
    )
    enable_ema: bool = field(
        default=False,
        metadata={"help": "Keep a moving average of the actor's weights too, and leave it in OUTPUT_DIR/model_ema."},
    )
    ema_decay: float = field(
        default=0.992, metadata={"help": "What the moving average keeps of itself a step (DeepSpeed-Chat's value)."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "One of " + ", ".join(SCHEDULES) + "."})
    num_warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps of linear warm-up."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip gradients to this norm; 0 does not clip."})

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.actor_model_name_or_path),
            "--actor_model_name_or_path expects a model folder or hub name, got nothing",
        )  # whether there has to be a critic's too, --reward and --advantage say
        for flag in ("actor_learning_rate", "critic_learning_rate"):
            got = getattr(self, flag)
            mistakes.require(got > 0, f"--{flag} expects more than 0, got {got}")
        for flag in ("actor_lora_learning_rate", "critic_lora_learning_rate"):
            check_lora_learning_rate(mistakes, f"--{flag}", getattr(self, flag))
        decay = self.ema_decay
        mistakes.require(0 < decay < 1, f"--ema_decay expects a share between 0 and 1, got {decay}")
        check_schedule(mistakes, self.lr_scheduler_type)
        check_engine_choices(
            mistakes,
            self.dtype,
            {"--actor_zero_stage": self.actor_zero_stage, "--critic_zero_stage": self.critic_zero_stage},
            self.offload,
        )
        check_dropout(mistakes, "--actor_dropout", self.actor_dropout)
        check_dropout(mistakes, "--critic_dropout", self.critic_dropout)
        check_lora(mistakes, self.actor_lora_dim, self.lora_dropout)
        check_lora(mistakes, self.critic_lora_dim, self.lora_dropout)
        check_shared_trunk(self, mistakes)

    def actor_model(self) -> ModelSettings:
        return self._model("actor", self.actor_model_name_or_path)

    def critic_model(self) -> ModelSettings:
        return self._model("critic", self.critic_model_name_or_path)

    def actor_engine(self) -> EngineSettings:
        return self._engine("actor")

    def critic_engine(self) -> EngineSettings:
        return self._engine("critic")

    def _model(self, role: str, path: str) -> ModelSettings:
        return ModelSettings(
            name_or_path=path,
            dropout=getattr(self, f"{role}_dropout"),
            gradient_checkpointing=getattr(self, f"{role}_gradient_checkpointing"),
            lora_dim=getattr(self, f"{role}_lora_dim"),
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_module_name=getattr(self, f"{role}_lora_module_name"),
            only_optimize_lora=self.only_optimize_lora,
            trust_remote_code=self.trust_remote_code,
        )

    def _engine(self, role: str) -> EngineSettings:
        return EngineSettings(
            dtype=self.dtype,
            zero_stage=getattr(self, f"{role}_zero_stage"),
            offload=self.offload,
            learning_rate=getattr(self, f"{role}_learning_rate"),
            weight_decay=getattr(self, f"{role}_weight_decay"),
            lr_scheduler_type=self.lr_scheduler_type,
            num_warmup_steps=self.num_warmup_steps,
            max_grad_norm=self.max_grad_norm,
            lora_learning_rate=getattr(self, f"{role}_lora_learning_rate"),
        )


@dataclass
class PpoArguments:
    """Rollouts, rewards and updates."""

    per_device_generation_batch_size: int = field(default=16, metadata={"help": "Prompts of one rollout of one rank."})
    num_samples_per_prompt: int = field(default=1, metadata={"help": "Responses drawn for each prompt."})
    generation_batches: int = field(
        default=1, metadata={"help": "Rollouts of one rank between two updates; as many more as one minibatch needs."}
    )
    per_device_training_batch_size: int = field(
        default=16, metadata={"help": "Most sequences in one forward of a rank."}
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "A minibatch is training batch size x ranks x this many sequences, exactly."}
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None, metadata={"help": "Most tokens in one forward, padding included; default: no bound."}
    )
    padded: bool = field(
        default=False, metadata={"help": "One sequence a row, padded: the reference that packing is tested against."}
    )
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the prompts."})
    prompt_sampler: str | None = field(
        default=None,
        metadata={
            "help": "FILE.py:NAME, a PromptSampler that chooses the prompts of each rollout and sees its scores; "
            "default: shuffled epochs."
        },
    )
    prompt_dataset: str | None = field(
        default=None,
        metadata={"help": "FILE.py:NAME, a PromptDataset: prompts that may change after each rollout."},
    )
    max_train_steps: int | None = field(
        default=None, metadata={"help": "Stop after so many rollouts with their updates."}
    )
    ppo_epochs: int = field(default=1, metadata={"help": "Passes over each rollout's minibatches."})
    reuse_forwards: bool = field(
        default=False,
        metadata={
            "help": "With one optimizer step a rollout: learn from the very forwards that read log-probabilities and "
            "values, whose activations are kept meanwhile."
        },
    )
    max_answer_seq_len: int = field(default=256, metadata={"help": "Most tokens of a response."})
    rollout_engine: str = field(
        default="hf",
        metadata={"help": "What draws the responses: hf, vllm, or hybrid (DeepSpeed's own rollout engine)."},
    )
    temperature: float = field(default=1.0, metadata={"help": "Of rollouts, and of the policy that is trained."})
    top_k: int = field(default=0, metadata={"help": "Draw from the k likeliest tokens; 0 from all."})
    top_p: float = field(default=1.0, metadata={"help": "Draw from the likeliest tokens of this mass; 1 from all."})
    min_p: float = field(
        default=0.0, metadata={"help": "Draw from tokens at least this share as likely as the likeliest; 0 from all."}
    )
    stop: list[str] = field(
        default_factory=list, metadata={"help": "Texts that end a response: it keeps the one that it completes."}
    )
    bad_words: list[str] = field(
        default_factory=list, metadata={"help": "Texts whose tokens are never drawn one after the other."}
    )
    rollout_dump: str | None = field(default=None, metadata={"help": "Write every rollout to this folder."})
    rollout_replay: str | None = field(
        default=None, metadata={"help": "Read the rollouts of --rollout_dump from this folder; nothing is generated."}
    )
    normalize_reward_scores: bool = field(
        default=False,
        metadata={
            "help": "Before the clip, scores become (score - mean) / std by the constants that step 2 left in the "
            "reward model's configuration."
        },
    )
    clip_reward: float = field(default=5.0, metadata={"help": "The reward model's scores are clipped to +- this."})
    unsup_coef: float = field(default=27.8, metadata={"help": "Weight of the pretraining loss, where text is given."})
    eval_interval: int = field(
        default=0,
        metadata={"help": "Evaluate every so many rollouts too; always after training."},
    )
    val_before_train: bool = field(default=True, metadata={"help": "Evaluate before training too."})
    val_only: bool = field(default=False, metadata={"help": "Evaluate, and train and save nothing."})
    val_greedy: bool = field(
        default=False,
        metadata={"help": "Evaluate greedy responses beside the sampled ones: eval_greedy/... in the metrics."},
    )
    show_samples: int = field(
        default=1, metadata={"help": "Print so many prompts with their responses and rewards at each evaluation."}
    )
    report_mfu: bool = field(
        default=True,
        metadata={"help": "Report train/mfu, of the updates, as the other steps do."},
    )
    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Prompts of one evaluation rollout of a rank."}
    )
    checker: str | None = field(
        default=None,
        metadata={
            "help": "A rule that scores held-out responses and trains nothing: one of --reward's, or one of yours as "
            "FILE.py:NAME."
        },
    )

    def __post_init__(self) -> None:
        # DeepSpeed-Chat accumulates gradients over rollouts: where a minibatch is several of them, so many are drawn.
        rolled_out, minibatch = self.sequences_per_rollout, self.sequences_per_minibatch
        if 0 < rolled_out < minibatch and minibatch % rolled_out == 0:
            self.generation_batches *= minibatch // rolled_out

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        whole = (
            "per_device_generation_batch_size", "num_samples_per_prompt", "generation_batches",
            "per_device_training_batch_size", "gradient_accumulation_steps", "ppo_epochs", "max_answer_seq_len",
            "per_device_eval_batch_size", "max_train_steps", "max_tokens_per_micro_batch",
        )  # fmt: skip
        for flag in whole:
            got = getattr(self, flag)
            mistakes.require(got is None or got >= 1, f"--{flag} expects a whole number from 1 up, got {got}")
        for flag in ("num_train_epochs", "clip_reward"):
            got = getattr(self, flag)
            mistakes.require(got > 0, f"--{flag} expects more than 0, got {got}")
        for flag in ("unsup_coef", "eval_interval", "show_samples"):
            got = getattr(self, flag)
            mistakes.require(got >= 0, f"--{flag} expects 0 or more, got {got}")
        rolled_out, minibatch = self.sequences_per_rollout, self.sequences_per_minibatch
        mistakes.require(
            minibatch >= 1 and rolled_out % max(minibatch, 1) == 0,
            f"each rank rolls out {rolled_out} sequences (--per_device_generation_batch_size x "
            "--num_samples_per_prompt x --generation_batches), "
            f"which does not divide into minibatches of {minibatch} (--per_device_training_batch_size x "
            "--gradient_accumulation_steps); make the first a multiple of the second",
        )
        steps = self.steps_per_rollout
        mistakes.require(
            not self.reuse_forwards or (steps == 1 and self.generation_batches == 1),
            "--reuse_forwards learns once from each rollout's forwards, and --ppo_epochs, --generation_batches and "
            f"--per_device_training_batch_size make {steps} optimizer steps of {self.generation_batches} rollouts; "
            "make it one of one, or leave it out",
        )
        mistakes.require(self.temperature > 0, f"--temperature expects more than 0, got {self.temperature}")
        mistakes.require(self.top_k >= 0, f"--top_k expects 0 (all tokens) or more, got {self.top_k}")
        mistakes.require(0 < self.top_p <= 1, f"--top_p expects more than 0 and at most 1, got {self.top_p}")
        mistakes.require(0 <= self.min_p <= 1, f"--min_p expects a number from 0 to 1, got {self.min_p}")
        self._validate_rollouts(mistakes)
        for flag in ("prompt_sampler", "prompt_dataset"):
            if getattr(self, flag) is not None:
                mistakes.note(check_address, getattr(self, flag), f"--{flag}")

    def _validate_rollouts(self, mistakes: Mistakes) -> None:
        for flag in ("stop", "bad_words"):
            mistakes.require("" not in getattr(self, flag), f"--{flag} expects texts of a character or more, got ''")
        if self.rollout_engine == "hybrid":
            for flag in ("min_p", "bad_words"):
                got = getattr(self, flag)
                mistakes.require(
                    not got,
                    f"--rollout_engine hybrid has no --{flag}, got {got}: DeepSpeed's engine takes temperature, top_k "
                    "and top_p alone; leave it out or take --rollout_engine hf",
                )
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
