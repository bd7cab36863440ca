"""The LoRA flags. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.flags.flags import flag, flags_of

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

ROLES = ("actor", "critic")


@dataclass
class LoraArguments:
    """The adapters of the model that a step trains."""

    topic: ClassVar[str] = "lora"

    lora_dim: int = flag(0, "Rank of LoRA adapters; 0 trains all weights instead.", "rank >= 0")
    lora_alpha: float = flag(16.0, "LoRA's alpha; adapters are scaled by alpha / rank.", "number")
    use_rslora: bool = flag(
        False,
        "Scale adapters by alpha / sqrt(rank), so that higher ranks learn as fast (rsLoRA, Kalajdzievski 2023).",
    )
    use_dora: bool = flag(
        False,
        "Weight-decomposed adapters: a direction plus a trained magnitude per layer output (DoRA, Liu et al. 2024); "
        "slower than LoRA.",
    )
    lora_dropout: float = flag(0.0, "Dropout rate before the adapters.", "0 <= probability < 1")
    lora_module_name: str = flag(
        "all-linear",
        "Linear layers that get adapters: 'all-linear', or comma-separated parts of their names; q_proj$ matches the "
        "end of a name.",
        "names",
    )
    only_optimize_lora: bool = flag(True, "With LoRA: freeze all other weights (a new scalar head still trains).")
    lora_learning_rate: float | None = flag(
        None, "Peak learning rate of LoRA's adapters; default: --learning_rate.", "rate > 0"
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        _check_kinds(mistakes, self, self.lora_dim)


_ROLES_FLAGS = (
    *flags_of(
        LoraArguments,
        {
            "lora_learning_rate": "Peak learning rate of the ROLE's adapters; default: the ROLE's learning rate.",
            "lora_dim": {
                "actor": "Rank of the actor's LoRA adapters; the actor with adapters off serves as the reference. 0 "
                "trains without adapters.",
                "critic": "Rank of the critic's LoRA adapters; 0 trains without adapters.",
            },
            "lora_module_name": "Linear layers of the ROLE that get adapters, like step 1's --lora_module_name.",
        },
        ROLES,
    ),
    *flags_of(
        LoraArguments,
        {
            "lora_alpha": "",
            "use_rslora": "",
            "use_dora": "",
            "lora_dropout": "",
            "only_optimize_lora": "With LoRA: freeze all other weights.",
        },
    ),
)


@dataclass
class RolesLoraArguments(make_dataclass("RoleLoraFlags", _ROLES_FLAGS)):  # type: ignore[misc]
    """The adapters of actor and critic."""

    topic: ClassVar[str] = "lora"

    share_trunk: bool = flag(
        False,
        "With LoRA on both: the critic becomes adapters and a new scalar head on the actor's frozen trunk, so the "
        "actor, reference and critic need the memory of only one model.",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        _check_kinds(mistakes, self, self.actor_lora_dim, self.critic_lora_dim)


def _check_kinds(mistakes: Mistakes, flags: Any, *dims: int) -> None:
    """Note adapter flags on runs without adapters. dims: ranks of the models' adapters."""
    for flag_name, does, is_given in (
        ("--use_rslora", "scales LoRA's adapters", flags.use_rslora),
        ("--use_dora", "adds magnitudes to LoRA's adapters", flags.use_dora),
    ):
        mistakes.require(
            not is_given or any(dims),
            f"{flag_name} {does}, but this run has none; set --lora_dim (step 3: --actor_lora_dim), or drop "
            f"{flag_name}",
        )
