"""The training of one model under DeepSpeed, as one record and as the flags that steps 1 and 2 share. Cheap to
import: `--help` reaches this module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from training.utils.base.user_files import named_object
from training.utils.engine.config.schedules import OWN_SCHEDULES, SCHEDULES, ScheduleShape
from training.utils.flags.added import NO_FLAGS, AddedFlags, advice
from training.utils.flags.flags import flag, settings_of
from training.utils.layout.bounds import SMALL_FORWARD_TOKENS
from training.utils.plugins.plugin import OptimizerEntry
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

ADAMW = "adamw"
OPTIMIZERS = {ADAMW: OptimizerEntry("training.utils.engine.optimizers:adamw", states=2, states_name="AdamW's moments")}
OPTIMIZERS |= added("optimizers", OPTIMIZERS)
DTYPE_NAMES = ("fp32", "bf16", "fp16")
ADAM_BETAS = (0.9, 0.95)  # GPT-3 (Brown et al. 2020, appendix B); the same as DeepSpeed-Chat's
SEQUENCES_OF_A_FORWARD = 16
ADAM_EPSILON = 1e-8  # Adam's authors' (Kingma and Ba 2015), and torch's


def _reading(setting: str) -> tuple[str, ...]:
    return tuple(name for name, schedule in OWN_SCHEDULES.items() if setting in schedule.reads)


class OwnConfig(Protocol):
    """A user's own DeepSpeed configuration, which a plugin reads (`engine_configs` of `Plugin.tables`)."""

    def completed(self, ours: dict[str, Any], settings: EngineSettings, ranks: int) -> dict[str, Any]:
        """Return the configuration for `deepspeed.initialize`. ours: built from the flags. ThreestepError with
        every mistake."""

    def notes(self, final: dict[str, Any]) -> list[str]:
        """Return lines for the log. final: what `completed` returned."""


@dataclass(frozen=True)
class EngineSettings:
    """learning_rate: the schedule's peak.
    warmup_ratio: share of the run's steps that warm up; 0: num_warmup_steps do.
    min_lr_ratio, stable_ratio: see `schedules.ScheduleShape`.
    zero3_live_parameters: None: by the model's size (`zero3_limits`).
    max_grad_norm: over all weights and ranks; 0 turns clipping off.
    """

    dtype: str = "fp32"
    zero_stage: int = 0
    offload: bool = False
    zero3_live_parameters: int | None = None
    own_config: OwnConfig | None = None
    learning_rate: float = 1e-5
    optimizer: str = ADAMW
    weight_decay: float = 0.0
    lr_scheduler_type: str = "cosine"
    num_warmup_steps: int = 0
    warmup_ratio: float = 0.0
    adam_beta1: float = ADAM_BETAS[0]
    adam_beta2: float = ADAM_BETAS[1]
    adam_epsilon: float = ADAM_EPSILON
    min_lr_ratio: float = 0.0
    stable_ratio: float = 0.9
    max_grad_norm: float = 1.0
    bf16_optimizer_states: bool = False


@dataclass
class RateArguments:
    """The learning rate, whose default is each step's."""

    learning_rate: float = flag(EngineSettings.learning_rate, "Peak learning rate.", "rate > 0", topic="optimizer")


@dataclass
class EngineArguments:
    """Batches, epochs, precision, ZeRO and the learning-rate schedule."""

    topic: ClassVar[str] = "optimizer"

    per_device_train_batch_size: int | None = flag(
        SEQUENCES_OF_A_FORWARD,
        "Sequences (step 2: prompts) per forward pass on each rank, packed into as few rows as possible. auto: keeps "
        f"the default batch per step, 16 x --gradient_accumulation_steps{''.join(advice('batch'))}.",
        "sequences >= 1",
        topic="batch",
        takes_auto=True,
    )
    per_device_eval_batch_size: int = flag(
        16,
        "Sequences (step 2: prompts) per evaluation forward pass on each rank.",
        "sequences >= 1",
        topic="evaluation",
        may_change=True,
    )
    gradient_accumulation_steps: int = flag(
        1,
        "Forward passes per optimizer step. A step uses exactly batch size x ranks x this many sequences.",
        "steps >= 1",
        topic="batch",
    )
    max_tokens_per_micro_batch: int | None = flag(
        None,
        "Maximum tokens in one forward pass, padding included; default: enough for a batch of the longest sequences, "
        f"but at most {SMALL_FORWARD_TOKENS:,} in packed rows on a CPU.",
        "tokens >= 1",
        topic="batch",
    )
    padded: bool = flag(
        False, "One padded sequence per row instead of packed rows; slower; for comparison.", topic="memory"
    )
    share_beginnings: int | None = flag(
        None,
        "Minimum length in tokens of a common prefix that is computed once per optimizer step, e.g. for rows of one "
        "conversation; 0: off; auto: 64 if the first steps' rows share prefixes. The gradient is the same. Packed rows "
        "only; responses always share their prompt.",
        "tokens >= 0",
        topic="batch",
        takes_auto=True,
    )
    num_train_epochs: float = flag(
        1.0,
        "Passes over the training rows; inf continues until --max_train_steps.",
        "epochs > 0",
        topic="batch",
        may_change=True,
    )
    max_train_steps: int | None = flag(
        None, "Stop after this many optimizer steps; default: no limit.", "steps >= 1", topic="batch", may_change=True
    )
    eval_interval: int | None = flag(
        None,
        "Optimizer steps between evaluations; 0: only before and after training. Default, without --eval_epochs: ten "
        "evenly spaced evaluations, or fewer if ten would read more rows than training does.",
        "steps >= 0",
        topic="evaluation",
        may_change=True,
    )
    eval_epochs: float = flag(
        0.0,
        "Also evaluate every time this many epochs are complete; 0 disables it.",
        "epochs >= 0",
        topic="evaluation",
        may_change=True,
    )
    report_mfu: bool = flag(
        True,
        "Report train/mfu, the share of this machine's matmul rate that training reaches; measuring the rate "
        "takes less than a second at the start.",
        topic="log",
        may_change=True,
    )
    optimizer: str = flag(ADAMW, "The optimizer: " + ", ".join(OPTIMIZERS) + ".", "name", choices=OPTIMIZERS)
    weight_decay: float = flag(0.0, "AdamW's weight decay; applied only to matrices.", "rate >= 0")
    adam_beta1: float = flag(ADAM_BETAS[0], "AdamW's decay rate for the mean of the gradients.", "0 <= rate < 1")
    adam_beta2: float = flag(
        ADAM_BETAS[1], "AdamW's decay rate for the mean of squared gradients (default: GPT-3's).", "0 <= rate < 1"
    )
    adam_epsilon: float = flag(ADAM_EPSILON, "AdamW's constant in the denominator.", "number > 0")
    lr_scheduler_type: str = flag("cosine", "One of " + ", ".join(SCHEDULES) + ".", "name", choices=SCHEDULES)
    num_warmup_steps: int = flag(0, "Optimizer steps of linear warm-up.", "steps >= 0")
    warmup_ratio: float = flag(
        0.0,
        "Warm-up length as a share of the run's optimizer steps, rounded up; replaces --num_warmup_steps.",
        "0 <= share < 1",
    )
    min_lr_ratio: float = flag(
        0.0,
        f"Minimum learning rate, as a share of its peak ({', '.join(_reading('min_lr_ratio'))}).",
        "0 <= share <= 1",
    )
    stable_ratio: float = flag(
        0.9,
        f"Share of post-warm-up steps at the peak rate, before the decay ({', '.join(_reading('stable_ratio'))}).",
        "0 <= share <= 1",
    )
    max_grad_norm: float = flag(1.0, "Clip gradients to this norm; 0 disables clipping.", "norm >= 0")
    dtype: str = flag(
        "bf16",
        "Training precision; fp16 needs a GPU and ZeRO stage 1, 2 or 3. bf16 keeps float32 master weights; "
        "DeepSpeed accumulates gradients in bf16 at ZeRO stage 0 and in float32 from stage 1 on.",
        choices=DTYPE_NAMES,
        topic="memory",
    )
    zero_stage: int = flag(
        0,
        "What ZeRO shards across ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights.",
        "0 <= stage <= 3",
        topic="memory",
    )
    offload: bool = flag(False, "Keep optimizer states (with ZeRO-3, also weights) in CPU memory.", topic="memory")
    zero3_live_parameters: int | None = flag(
        None,
        "ZeRO-3: most weights gathered at once per rank; default: set by model and memory (docs/reference/memory.md).",
        "weights >= 0",
        topic="memory",
    )
    bf16_optimizer_states: bool = flag(
        False,
        "Keep master weights, gradients and AdamW's moments in bfloat16: 10 bytes per weight instead of 18, but "
        "updates below 1/512 of a weight are lost to rounding (docs/reference/memory.md).",
        topic="memory",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_stage(mistakes, self, "--zero_stage", self.zero_stage)
        check_zero3_limit(mistakes, self.zero3_live_parameters, "--zero_stage 3", self.zero_stage == 3)
        check_schedule(mistakes, self)
        check_epochs(mistakes, self)
        mistakes.require(
            not (self.padded and self.share_beginnings),
            f"--share_beginnings {self.share_beginnings} needs packed rows, but --padded has one sequence per row; "
            "remove one of them",
        )

    def settings(self, learning_rate: float, added_flags: AddedFlags = NO_FLAGS) -> EngineSettings:
        """added_flags: of plugins, one of which may name the user's own configuration."""
        given = ((place, added_flags.value(name)) for name, place in added("engine_configs", ()).items())
        own = next((named_object(place)(value) for place, value in given if value is not None), None)
        return settings_of(EngineSettings, self, learning_rate=learning_rate, own_config=own)


def check_stage(mistakes: Mistakes, flags: Any, stage_flag: str, stage: int) -> None:
    """Note what does not go with a model's ZeRO stage, and with --bf16_optimizer_states. flags: with dtype, offload,
    optimizer and bf16_optimizer_states.

    DeepSpeed's stage 0 divides fp16's gradients by a loss scale that it never multiplied the loss by (deepspeed 0.19.8,
    engine.py: backward asks for a ZeROOptimizer), so that Adam sees 1/65536 of them beside its epsilon.
    """
    name = flags.optimizer
    mistakes.require(
        not flags.offload or stage > 0,
        f"--offload expects {stage_flag} 1, 2 or 3, got 0: stage 0 has nothing to offload",
    )
    mistakes.require(
        stage == 0 or name not in OPTIMIZERS or not OPTIMIZERS[name].whole_weights,
        f"--optimizer {name} needs whole weights, but gets flat shards with {stage_flag} {stage}; use "
        f"{stage_flag} 0, or another optimizer",
    )
    mistakes.require(
        flags.dtype != "fp16" or stage > 0,
        f"--dtype fp16 expects a GPU and {stage_flag} 1, 2 or 3, got 0: DeepSpeed does not scale the loss at stage 0; "
        "stage 1 gives the same results, even on one GPU; without a GPU, use bf16",
    )
    if not flags.bf16_optimizer_states:
        return
    mistakes.require(flags.dtype == "bf16", f"--bf16_optimizer_states expects --dtype bf16, got {flags.dtype}")
    mistakes.require(stage > 0, f"--bf16_optimizer_states expects {stage_flag} 1, 2 or 3, got 0: stage 0 has none")
    mistakes.require(
        not flags.offload,
        "--bf16_optimizer_states does not work with --offload, which needs DeepSpeed's compiled optimizer; remove "
        "one of them",
    )


def check_zero3_limit(mistakes: Mistakes, given: int | None, wanted: str, is_zero3: bool) -> None:
    """Note a limit of ZeRO-3 where no model is trained so. wanted: the flag that would ask for it."""
    mistakes.require(
        given is None or is_zero3,
        f"--zero3_live_parameters {given} limits what ZeRO-3 gathers, but no model uses ZeRO-3; remove it, or use "
        f"{wanted}",
    )


def check_schedule(mistakes: Mistakes, flags: Any) -> None:
    """Note settings that --lr_scheduler_type does not read. flags: with the fields of a ScheduleShape, and
    num_warmup_steps."""
    for setting in ("min_lr_ratio", "stable_ratio"):
        given = getattr(flags, setting)
        schedules = _reading(setting)
        mistakes.require(
            given == getattr(ScheduleShape, setting) or flags.lr_scheduler_type in schedules,
            f"--{setting} {given:g} applies only to the schedules {', '.join(schedules)}, but --lr_scheduler_type is "
            f"{flags.lr_scheduler_type}; remove it, or use one of those",
        )
    mistakes.require(
        not (flags.num_warmup_steps and flags.warmup_ratio),
        f"--num_warmup_steps {flags.num_warmup_steps} and --warmup_ratio {flags.warmup_ratio:g} both set the length of "
        "the warm-up; remove one of them",
    )


def check_epochs(mistakes: Mistakes, flags: Any) -> None:
    """Note a run without an end. flags: with num_train_epochs and max_train_steps"""
    mistakes.require(
        not math.isinf(flags.num_train_epochs) or flags.max_train_steps is not None,
        "--num_train_epochs inf needs --max_train_steps to end the run; set it",
    )
