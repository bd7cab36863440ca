"""The flags of step 3's models. Cheap to import for `--help`. Sources of the defaults: docs/ppo.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.utils.engine.arguments import (
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
from training.utils.engine.schedules import SCHEDULES
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag, settings_of


@dataclass
class RolesArguments:
    """The four models: actor (and reference, its start), critic (and reward model, its start)."""

    actor_model_name_or_path: str = flag("", "Step 1's model: actor and reference.")
    critic_model_name_or_path: str = flag("", "Step 2's model: critic and reward model; not needed without both.")
    pad_token: str | None = flag(None, "Pad token, for a tokenizer that names none.")
    trust_remote_code: bool = flag(
        ModelSettings.trust_remote_code, "Run Python code that comes with the models or tokenizers; read it first."
    )
    actor_learning_rate: float = flag(9.65e-6, "Peak learning rate of the actor.", above=0)
    critic_learning_rate: float = flag(5e-6, "Peak learning rate of the critic.", above=0)
    actor_lora_learning_rate: float | None = flag(
        None, "Peak learning rate of the actor's adapters; default: the actor's.", above=0
    )
    critic_lora_learning_rate: float | None = flag(
        None, "Peak learning rate of the critic's adapters; default: the critic's.", above=0
    )
    actor_weight_decay: float = flag(0.0, "AdamW's decay on the actor's matrices.")
    critic_weight_decay: float = flag(0.0, "AdamW's decay on the critic's matrices.")
    adam_beta1: float = flag(ADAM_BETAS[0], BETA1_HELP, least=0, below=1)
    adam_beta2: float = flag(ADAM_BETAS[1], BETA2_HELP, least=0, below=1)
    adam_epsilon: float = flag(ADAM_EPSILON, EPSILON_HELP, above=0)
    actor_zero_stage: int = flag(0, "ZeRO stage of the actor; 3 shards the reference too.", least=0, most=3)
    critic_zero_stage: int = flag(0, "ZeRO stage of the critic; 3 shards the reward model too.", least=0, most=3)
    zero3_live_parameters: int | None = flag(None, LIVE_HELP, least=0)
    zero3_prefetch_parameters: int | None = flag(None, PREFETCH_HELP, least=0)
    actor_gradient_checkpointing: bool = flag(False, "Recompute the actor's activations.")
    critic_gradient_checkpointing: bool = flag(False, "Recompute the critic's activations.")
    actor_dropout: float | None = flag(
        0.0, "Dropout of the actor; if not 0, the first ratio of an update is not 1.", least=0, below=1
    )
    critic_dropout: float | None = flag(0.0, "Dropout of the critic.", least=0, below=1)
    actor_lora_dim: int = flag(0, "LoRA rank of the actor; without its adapter it is the reference.", least=0)
    critic_lora_dim: int = flag(0, "LoRA rank of the critic.", least=0)
    actor_lora_module_name: str = flag("all-linear", "As step 1's --lora_module_name.")
    critic_lora_module_name: str = flag("all-linear", "As step 1's --lora_module_name.")
    share_trunk: bool = flag(
        False,
        "With LoRA of both: the critic is adapters and a new scalar head on the actor's frozen trunk, so "
        "that actor, reference and critic take one model's memory.",
    )
    lora_alpha: float = flag(16.0, "LoRA's scale is alpha / rank.")
    lora_dropout: float = flag(0.0, "Dropout before the adapters.", least=0, below=1)
    only_optimize_lora: bool = flag(True, "With LoRA: freeze every other weight.")
    dtype: str = flag("bf16", "fp32, bf16 or fp16 (GPU only).", choices=DTYPE_NAMES)
    bf16_optimizer_states: bool = flag(False, BF16_STATES_HELP)
    offload: bool = flag(False, "Keep actor's and critic's optimizer state in CPU memory.")
    offload_reference_model: bool = flag(False, "ZeRO-3: keep the reference's weights in CPU memory.")
    offload_reward_model: bool = flag(False, "ZeRO-3: keep the reward model's weights in CPU memory.")
    enable_ema: bool = flag(False, "Also keep a moving average of the actor's weights, saved as OUTPUT_DIR/model_ema.")
    ema_decay: float = flag(0.992, "Decay of the moving average per step (DeepSpeed-Chat's value).", above=0, below=1)
    router_aux_loss_coef: float | None = flag(
        None,
        "Mixtures of experts: weight of the balancing loss of actor's and critic's routers; default: each model's "
        "own; 0 adds none.",
        least=0,
    )
    lr_scheduler_type: str = flag("cosine", "One of " + ", ".join(SCHEDULES) + ".", choices=SCHEDULES)
    num_warmup_steps: int = flag(0, "Optimizer steps of linear warm-up.")
    warmup_ratio: float = flag(0.0, WARMUP_HELP, least=0, below=1)
    init_lr_ratio: float = flag(0.0, INIT_LR_HELP, least=0, most=1)
    min_lr_ratio: float = flag(0.0, MIN_LR_HELP, least=0, most=1)
    num_cycles: float = flag(0.5, CYCLES_HELP, above=0)
    stable_ratio: float = flag(0.9, STABLE_HELP, least=0, most=1)
    max_grad_norm: float = flag(1.0, "Clip gradients to this norm; 0 does not clip.")

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
        return settings_of(ModelSettings, self, role, name_or_path=getattr(self, f"{role}_model_name_or_path"))

    def engine(self, role: str) -> EngineSettings:
        return settings_of(EngineSettings, self, role)

    def frozen_engine(self, role: str) -> EngineSettings:
        """Of the reference, which starts as the actor, or of the reward model, as which the critic starts."""
        offloads = self.offload_reference_model if role == "actor" else self.offload_reward_model
        return replace(self.engine(role), offload=self.offload or offloads)
