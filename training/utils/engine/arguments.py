"""The flags of one trained engine, shared by steps 1 and 2. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.engine.settings import EngineSettings
from training.utils.run.errors import Mistakes

DTYPE_NAMES = ("fp32", "bf16", "fp16")
# Those of transformers.get_scheduler that need nothing but warm-up and total steps.
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
)  # fmt: skip


@dataclass
class EngineArguments:
    """Batches, epochs, precision, ZeRO and the learning-rate schedule."""

    per_device_train_batch_size: int = field(
        default=16,
        metadata={"help": "Sequences (step 2: prompts) of one forward of one rank; packed, as many tokens."},
    )
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "The same, in evaluation."})
    gradient_accumulation_steps: int = field(
        default=1,
        metadata={"help": "An optimizer step takes train batch size x ranks x this many sequences, exactly."},
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None, metadata={"help": "Most tokens in one forward, padding included; default: no bound."}
    )
    padded: bool = field(
        default=False, metadata={"help": "One sequence a row, padded: the reference that packing is tested against."}
    )
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the training rows."})
    max_train_steps: int | None = field(default=None, metadata={"help": "Stop after so many optimizer steps."})
    eval_interval: int = field(
        default=0, metadata={"help": "Evaluate every so many optimizer steps; always before and after training."}
    )
    report_mfu: bool = field(
        default=True,
        metadata={
            "help": "Report train/mfu, the share of this machine's matmul rate that training reaches; the rate is "
            "measured at the start, in less than a second."
        },
    )
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's decay, on matrices only."})
    lora_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of LoRA's adapters; default: learning_rate."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "One of " + ", ".join(SCHEDULES) + "."})
    num_warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps of linear warm-up."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip gradients to this norm; 0 does not clip."})
    dtype: str = field(
        default="bf16",
        metadata={
            "help": "fp32, bf16 or fp16 (GPU only). bf16 keeps float32 master weights; at ZeRO stage 0 DeepSpeed "
            "adds up its gradients in bf16, from stage 1 on in fp32."
        },
    )
    zero_stage: int = field(default=0, metadata={"help": "ZeRO: 0 none, 1 optimizer, 2 and gradients, 3 and weights."})
    offload: bool = field(default=False, metadata={"help": "Keep optimizer state (ZeRO-3: weights too) in CPU memory."})
    deepspeed_config: str | None = field(
        default=None, metadata={"help": "A DeepSpeed JSON of your own; missing keys are filled in and named."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        whole = (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
            "max_train_steps", "max_tokens_per_micro_batch",
        )  # fmt: skip
        for flag in whole:
            got = getattr(self, flag)
            mistakes.require(got is None or got >= 1, f"--{flag} expects a whole number from 1 up, got {got}")
        for flag in ("eval_interval", "num_warmup_steps", "weight_decay", "max_grad_norm"):
            got = getattr(self, flag)
            mistakes.require(got >= 0, f"--{flag} expects 0 or more, got {got}")
        mistakes.require(
            self.num_train_epochs > 0, f"--num_train_epochs expects more than 0, got {self.num_train_epochs}"
        )
        check_lora_learning_rate(mistakes, "--lora_learning_rate", self.lora_learning_rate)
        check_schedule(mistakes, self.lr_scheduler_type)
        check_engine_choices(mistakes, self.dtype, {"--zero_stage": self.zero_stage}, self.offload)

    def settings(self, learning_rate: float) -> EngineSettings:
        return EngineSettings(
            dtype=self.dtype,
            zero_stage=self.zero_stage,
            offload=self.offload,
            deepspeed_config=self.deepspeed_config,
            learning_rate=learning_rate,
            weight_decay=self.weight_decay,
            lr_scheduler_type=self.lr_scheduler_type,
            num_warmup_steps=self.num_warmup_steps,
            max_grad_norm=self.max_grad_norm,
            lora_learning_rate=self.lora_learning_rate,
        )


def check_lora_learning_rate(mistakes: Mistakes, flag: str, rate: float | None) -> None:
    """Note a rate that trains nothing."""
    mistakes.require(rate is None or rate > 0, f"{flag} expects more than 0, got {rate}")


def check_schedule(mistakes: Mistakes, name: str) -> None:
    """Note a learning-rate schedule that does not exist."""
    mistakes.require_one_of("--lr_scheduler_type", name, SCHEDULES)


def check_engine_choices(mistakes: Mistakes, dtype: str, zero_stages: dict[str, int], offload: bool) -> None:
    """Note a precision, ZeRO stage or offload that does not exist."""
    mistakes.require(dtype in DTYPE_NAMES, f"--dtype expects one of {', '.join(DTYPE_NAMES)}, got '{dtype}'")
    for flag, stage in zero_stages.items():
        mistakes.require(stage in (0, 1, 2, 3), f"{flag} expects 0, 1, 2 or 3, got {stage}")
        mistakes.require(
            not (offload and stage == 0), f"--offload needs {flag} 1, 2 or 3: stage 0 has nothing that could be moved"
        )
