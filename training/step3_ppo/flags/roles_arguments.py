"""The flags of step 3's models. Cheap to import for `--help`. Sources of the defaults: docs/ppo.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from training.utils.engine.config.arguments import (
    ADAM_BETAS,
    ADAM_EPSILON,
    BETA1_HELP,
    BETA2_HELP,
    BF16_STATES_HELP,
    CYCLES_HELP,
    DTYPE_NAMES,
    EPSILON_HELP,
    INIT_LR_HELP,
    LIVE_HELP,
    MIN_LR_HELP,
    PREFETCH_HELP,
    STABLE_HELP,
    WARMUP_HELP,
    EngineSettings,
    check_bf16_states,
    check_offload,
    check_schedule,
    check_zero3_limits,
)
from training.utils.engine.config.schedules import SCHEDULES
from training.utils.flags.flags import flag, settings_of
from training.utils.models.arguments import (
    FREEZE_PROJECTOR_HELP,
    FREEZE_TOWER_HELP,
    HEAD_CHUNK_HELP,
    KEPT_FEATURES_HELP,
)
from training.utils.models.quantized.quantization import (
    DOUBLE_HELP,
    EIGHT_BIT_HELP,
    FOUR_BIT_HELP,
    FOUR_BIT_KINDS,
    KIND_HELP,
    NOT_SHARDED,
    check_beside_quantization,
    check_quantization,
    check_ranks,
)
from training.utils.models.settings import ModelSettings

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class RolesArguments:
    """The four models: actor (and reference, its start), critic (and reward model, its start)."""

    topic: ClassVar[str] = "model"

    actor_model_name_or_path: str = flag(
        "", "Step 1's model, a folder or a hub name: the start of actor and reference (required).", unit="model"
    )
    critic_model_name_or_path: str = flag(
        "",
        "Step 2's model, a folder or a hub name: the reward model, and the start of the critic. Needed if "
        "one of them is used.",
        unit="model",
    )
    pad_token: str | None = flag(None, "Token to pad with, for a tokenizer that has no pad token.", unit="token")
    trust_remote_code: bool = flag(
        ModelSettings.trust_remote_code, "Run Python code that comes with the models or tokenizers; read it first."
    )
    actor_learning_rate: float = flag(
        9.65e-6, "Peak learning rate of the actor.", above=0, unit="rate", topic="optimizer"
    )
    critic_learning_rate: float = flag(
        5e-6, "Peak learning rate of the critic.", above=0, unit="rate", topic="optimizer"
    )
    actor_lora_learning_rate: float | None = flag(
        None, "Peak learning rate of the actor's adapters; default: the actor's.", above=0, unit="rate", topic="lora"
    )
    critic_lora_learning_rate: float | None = flag(
        None, "Peak learning rate of the critic's adapters; default: the critic's.", above=0, unit="rate", topic="lora"
    )
    actor_weight_decay: float = flag(
        0.0, "AdamW's weight decay of the actor, on matrices only.", unit="rate", topic="optimizer"
    )
    critic_weight_decay: float = flag(
        0.0, "AdamW's weight decay of the critic, on matrices only.", unit="rate", topic="optimizer"
    )
    adam_beta1: float = flag(ADAM_BETAS[0], BETA1_HELP, least=0, below=1, unit="rate", topic="optimizer")
    adam_beta2: float = flag(ADAM_BETAS[1], BETA2_HELP, least=0, below=1, unit="rate", topic="optimizer")
    adam_epsilon: float = flag(ADAM_EPSILON, EPSILON_HELP, above=0, unit="number", topic="optimizer")
    actor_zero_stage: int = flag(
        0,
        "ZeRO stage of the actor, 0 to 3; 3 also shards the reference.",
        least=0,
        most=3,
        unit="stage",
        topic="memory",
    )
    critic_zero_stage: int = flag(
        0,
        "ZeRO stage of the critic, 0 to 3; 3 also shards the reward model.",
        least=0,
        most=3,
        unit="stage",
        topic="memory",
    )
    zero3_live_parameters: int | None = flag(None, LIVE_HELP, least=0, unit="weights", topic="memory")
    zero3_prefetch_parameters: int | None = flag(None, PREFETCH_HELP, least=0, unit="weights", topic="memory")
    head_chunk_mb: int = flag(0, HEAD_CHUNK_HELP, least=0, unit="mib", topic="memory")
    actor_gradient_checkpointing: bool = flag(
        False, "Recompute the actor's activations in the backward pass: less memory, more time.", topic="memory"
    )
    critic_gradient_checkpointing: bool = flag(
        False, "Recompute the critic's activations in the backward pass: less memory, more time.", topic="memory"
    )
    actor_dropout: float | None = flag(
        0.0,
        "Dropout of the actor; unless it is 0, the first probability ratio of an update is not 1.",
        least=0,
        below=1,
        unit="probability",
    )
    critic_dropout: float | None = flag(0.0, "Dropout of the critic.", least=0, below=1, unit="probability")
    actor_lora_dim: int = flag(
        0,
        "Rank of the actor's LoRA adapters; the actor without them is the reference. 0 trains without adapters.",
        least=0,
        unit="rank",
        topic="lora",
    )
    critic_lora_dim: int = flag(
        0, "Rank of the critic's LoRA adapters; 0 trains without adapters.", least=0, unit="rank", topic="lora"
    )
    actor_lora_module_name: str = flag(
        "all-linear",
        "Linear layers of the actor that get adapters, as step 1's --lora_module_name.",
        unit="names",
        topic="lora",
    )
    critic_lora_module_name: str = flag(
        "all-linear",
        "Linear layers of the critic that get adapters, as step 1's --lora_module_name.",
        unit="names",
        topic="lora",
    )
    share_trunk: bool = flag(
        False,
        "With LoRA of both: the critic is adapters and a new scalar head on the actor's frozen trunk, so "
        "that actor, reference and critic take one model's memory.",
        topic="lora",
    )
    lora_alpha: float = flag(16.0, "LoRA's scale is alpha / rank.", unit="number", topic="lora")
    lora_dropout: float = flag(0.0, "Dropout before the adapters.", least=0, below=1, unit="probability", topic="lora")
    only_optimize_lora: bool = flag(True, "With LoRA: freeze all other weights.", topic="lora")
    freeze_vision_tower: bool = flag(ModelSettings.freeze_vision_tower, FREEZE_TOWER_HELP)
    freeze_projector: bool = flag(ModelSettings.freeze_projector, FREEZE_PROJECTOR_HELP)
    kept_image_features_mb: int = flag(0, KEPT_FEATURES_HELP, least=0, unit="mib", topic="memory")
    load_in_4bit: bool = flag(False, FOUR_BIT_HELP, topic="lora")
    load_in_8bit: bool = flag(False, EIGHT_BIT_HELP, topic="lora")
    bnb_4bit_quant_type: str = flag("nf4", KIND_HELP, choices=FOUR_BIT_KINDS, unit="name", topic="lora")
    bnb_4bit_use_double_quant: bool = flag(False, DOUBLE_HELP, topic="lora")
    dtype: str = flag("bf16", "Precision of training; fp16 needs a GPU.", choices=DTYPE_NAMES, topic="memory")
    bf16_optimizer_states: bool = flag(False, BF16_STATES_HELP, topic="memory")
    offload: bool = flag(False, "Keep the optimizer states of actor and critic in CPU memory.", topic="memory")
    offload_reference_model: bool = flag(False, "ZeRO-3: keep the reference's weights in CPU memory.", topic="memory")
    offload_reward_model: bool = flag(False, "ZeRO-3: keep the reward model's weights in CPU memory.", topic="memory")
    enable_ema: bool = flag(
        False, "Also keep a moving average of the actor's weights; it is saved as OUTPUT_DIR/model_ema.", topic="policy"
    )
    ema_decay: float = flag(
        0.992,
        "Decay of the moving average per step (DeepSpeed-Chat's value).",
        above=0,
        below=1,
        unit="rate",
        topic="policy",
    )
    router_aux_loss_coef: float | None = flag(
        None,
        "Mixtures of experts: weight of the balancing loss of actor's and critic's routers; default: each model's "
        "own; 0 adds none.",
        least=0,
        unit="factor",
    )
    lr_scheduler_type: str = flag(
        "cosine", "One of " + ", ".join(SCHEDULES) + ".", choices=SCHEDULES, unit="name", topic="optimizer"
    )
    num_warmup_steps: int = flag(0, "Optimizer steps of linear warm-up.", unit="steps", topic="optimizer")
    warmup_ratio: float = flag(0.0, WARMUP_HELP, least=0, below=1, unit="share", topic="optimizer")
    init_lr_ratio: float = flag(0.0, INIT_LR_HELP, least=0, most=1, unit="share", topic="optimizer")
    min_lr_ratio: float = flag(0.0, MIN_LR_HELP, least=0, most=1, unit="share", topic="optimizer")
    num_cycles: float = flag(0.5, CYCLES_HELP, above=0, unit="waves", topic="optimizer")
    stable_ratio: float = flag(0.9, STABLE_HELP, least=0, most=1, unit="share", topic="optimizer")
    max_grad_norm: float = flag(1.0, "Clip gradients to this norm; 0 does not clip.", unit="norm", topic="optimizer")

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.actor_model_name_or_path),
            "--actor_model_name_or_path expects a model folder or hub name, got nothing",
        )  # whether there has to be a critic's too, --reward and --advantage say
        check_offload(mistakes, self.offload, "--actor_zero_stage", self.actor_zero_stage)
        check_offload(mistakes, self.offload, "--critic_zero_stage", self.critic_zero_stage)
        is_zero3 = 3 in (self.actor_zero_stage, self.critic_zero_stage)
        check_zero3_limits(mistakes, self, "--actor_zero_stage 3 or --critic_zero_stage 3", is_zero3)
        check_bf16_states(mistakes, self, "--actor_zero_stage", self.actor_zero_stage)
        check_bf16_states(mistakes, self, "--critic_zero_stage", self.critic_zero_stage)
        check_schedule(mistakes, self)
        check_quantization(mistakes, self)
        check_ranks(mistakes, self, {"--actor_lora_dim": self.actor_lora_dim})
        sharded = {f"--{role}_zero_stage 3": getattr(self, f"{role}_zero_stage") == 3 for role in ("actor", "critic")}
        check_beside_quantization(
            mistakes,
            self,
            {
                **{name: NOT_SHARDED if is_given else None for name, is_given in sharded.items()},
                "--share_trunk": "which lends one model's weights to two" if self.share_trunk else None,
            },
        )
        if self.share_trunk:
            self._validate_shared_trunk(mistakes)

    def _validate_shared_trunk(self, mistakes: Mistakes) -> None:
        for role in ("actor", "critic"):
            dim = getattr(self, f"{role}_lora_dim")
            mistakes.require(
                dim > 0,
                "--share_trunk trains adapters of actor and critic on one frozen trunk, and "
                f"--{role}_lora_dim is {dim}; give it 1 or more",
            )
        mistakes.require(
            self.only_optimize_lora,
            "--share_trunk keeps the trunk frozen, and --only_optimize_lora false trains it; leave out one of them",
        )
        stages = self.actor_zero_stage, self.critic_zero_stage
        mistakes.require(
            (stages[0] == 3) == (stages[1] == 3),
            f"--share_trunk: ZeRO 3 shards the trunk for both, and --actor_zero_stage is {stages[0]}, "
            f"--critic_zero_stage {stages[1]}; give 3 to both or to neither",
        )

    def model(self, role: str) -> ModelSettings:
        """role: actor or critic."""
        path = getattr(self, f"{role}_model_name_or_path")
        return settings_of(ModelSettings, self, role, name_or_path=path, takes_media=True)

    def engine(self, role: str) -> EngineSettings:
        return settings_of(EngineSettings, self, role)

    def frozen_engine(self, role: str) -> EngineSettings:
        """Of the reference, which starts as the actor, or of the reward model, as which the critic starts."""
        offloads = self.offload_reference_model if role == "actor" else self.offload_reward_model
        return replace(self.engine(role), offload=self.offload or offloads)
