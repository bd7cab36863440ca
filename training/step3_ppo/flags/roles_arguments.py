"""The flags of step 3's models. Cheap to import for `--help`. Sources of the defaults: docs/reference/equations.md."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from training.utils.engine.config.arguments import (
    EngineArguments,
    EngineSettings,
    RateArguments,
    check_schedule,
    check_stage,
    check_zero3_limit,
)
from training.utils.flags.added import NO_FLAGS, AddedFlags
from training.utils.flags.flags import flag, flags_of, settings_of
from training.utils.models.arguments import ModelArguments
from training.utils.models.settings import ModelSettings, preparers_of
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

ROLES = ("actor", "critic")


# What steps 1 and 2 declare for one model, here for each role or for both; `--help` has each topic in this order.
_FLAGS = (
    *flags_of(RateArguments, {"learning_rate": "Peak learning rate of the actor."}, ("actor",), default=9.65e-6),
    *flags_of(RateArguments, {"learning_rate": "Peak learning rate of the critic."}, ("critic",), default=5e-6),
    *flags_of(
        EngineArguments,
        {"weight_decay": "AdamW's weight decay for the ROLE; applied only to matrices."},
        ROLES,
        topic="optimizer",
    ),
    *flags_of(
        EngineArguments,
        {
            "optimizer": "",
            "adam_beta1": "",
            "adam_beta2": "",
            "adam_epsilon": "",
            "lr_scheduler_type": "",
            "num_warmup_steps": "",
            "warmup_ratio": "",
            "min_lr_ratio": "",
            "stable_ratio": "",
            "max_grad_norm": "",
        },
        topic="optimizer",
    ),
    *flags_of(
        EngineArguments,
        {
            "zero_stage": {
                "actor": "ZeRO stage of the actor, 0 to 3; 3 also shards the reference.",
                "critic": "ZeRO stage of the critic, 0 to 3; 3 also shards the reward model.",
            },
        },
        ROLES,
    ),
    *flags_of(EngineArguments, {"zero3_live_parameters": ""}),
    *flags_of(ModelArguments, {"head_chunk_mb": ""}),
    *flags_of(
        ModelArguments,
        {
            "model_name_or_path": {
                "actor": "Step 1's model (folder or hub name); the actor and the reference start from it (required).",
                "critic": (
                    "Step 2's model (folder or hub name); it is the reward model, and the critic starts from it. "
                    "Required if either is used."
                ),
            },
            "gradient_checkpointing": "Recompute the ROLE's activations in the backward pass: less memory, more time.",
        },
        ROLES,
    ),
    *flags_of(
        ModelArguments,
        {
            "pad_token": "",
            "trust_remote_code": "Run Python code that comes with the models or tokenizers; read it first.",
        },
    ),
    *flags_of(
        ModelArguments,
        {
            "dropout": {
                "actor": "Dropout rate of the actor; unless it is 0, an update's first probability ratio is not 1.",
                "critic": "Dropout rate of the critic.",
            }
        },
        ROLES,
        default=0.0,
    ),
    *flags_of(ModelArguments, {"freeze_vision_tower": "", "freeze_projector": ""}),
    *flags_of(
        EngineArguments,
        {
            "dtype": "Training precision; fp16 needs a GPU.",
            "bf16_optimizer_states": "",
            "offload": "Keep the optimizer states of the actor and the critic in CPU memory.",
        },
    ),
)


@dataclass
class RolesArguments(make_dataclass("RoleFlags", _FLAGS)):  # type: ignore[misc]
    """The four models: actor (and reference, its start), critic (and reward model, its start)."""

    topic: ClassVar[str] = "model"

    offload_reference_model: bool = flag(False, "ZeRO-3: keep the reference's weights in CPU memory.", topic="memory")
    offload_reward_model: bool = flag(False, "ZeRO-3: keep the reward model's weights in CPU memory.", topic="memory")

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        mistakes.require(
            bool(self.actor_model_name_or_path),
            "--actor_model_name_or_path is not set; set it to step 1's model (a folder or a hub name)",
        )  # whether there has to be a critic's too, --reward and --advantage say
        check_stage(mistakes, self, "--actor_zero_stage", self.actor_zero_stage)
        check_stage(mistakes, self, "--critic_zero_stage", self.critic_zero_stage)
        is_zero3 = 3 in (self.actor_zero_stage, self.critic_zero_stage)
        wanted = "--actor_zero_stage 3 or --critic_zero_stage 3"
        check_zero3_limit(mistakes, self.zero3_live_parameters, wanted, is_zero3)
        check_schedule(mistakes, self)

    def model(self, role: str, added_flags: AddedFlags = NO_FLAGS) -> ModelSettings:
        """role: actor or critic. added_flags: flags of plugins, which may change the models."""
        path = getattr(self, f"{role}_model_name_or_path")
        others = ("attn_implementation", "trains_adapter_on", "new_head", "rope_scaling")
        own = {"name_or_path": path, "takes_media": True, "preparers": preparers_of(added_flags, role)}
        return settings_of(ModelSettings, self, role, **own, defaults=others)

    def engine(self, role: str) -> EngineSettings:
        return settings_of(EngineSettings, self, role, defaults=("own_config",))

    def frozen_engine(self, role: str) -> EngineSettings:
        """Return settings of the reference, which starts as the actor, or of the reward model, as which the critic
        starts."""
        offloads = self.offload_reference_model if role == "actor" else self.offload_reward_model
        return replace(self.engine(role), offload=self.offload or offloads)


def critic_on_trunk(added_flags: AddedFlags) -> str:
    """Return the address of what makes the critic on the actor's trunk, as a plugin's flag asks (`critics` of
    `Plugin.tables`); "" where the critic is a model of its own."""
    return next((place for name, place in added("critics", ()).items() if added_flags.value(name)), "")
