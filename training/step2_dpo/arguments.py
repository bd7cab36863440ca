"""The flags of direct preference optimisation that no other step has. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.engine.config.arguments import RateArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.preference.arguments import PairLossArguments

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags

LOSS_TYPES = ("sigmoid", "ipo", "hinge")
REFERENCES = ("cached", "adapter_off")


@dataclass
class DpoArguments:
    """Direct preference optimisation."""

    topic: ClassVar[str] = "loss"

    learning_rate: float = flag_of(RateArguments, "Peak learning rate (Rafailov et al. 2023, app. B).", default=1e-6)
    beta: float = flag(
        0.1,
        "Strength of the pull towards the reference (Rafailov et al. 2023, app. B); 'ipo' regresses on 1/(2 beta).",
        "factor > 0",
    )
    loss_type: str = flag(
        "sigmoid",
        "'sigmoid' is DPO (Rafailov et al. 2023); 'ipo' is the squared loss on log-probabilities per token (Azar "
        "et al. 2023); 'hinge' is SLiC's (Zhao et al. 2023).",
        choices=LOSS_TYPES,
    )
    label_smoothing: float = flag_of(
        PairLossArguments, "'sigmoid' only: share of pairs assumed to be ranked the wrong way round (conservative DPO)."
    )
    sft_coef: float = flag(
        0.0,
        "Weight of the chosen response's negative log-likelihood per token (Pang et al. 2024); 0 leaves it out.",
        "factor >= 0",
    )
    reference: str = flag(
        "cached",
        "Where the reference's log-probabilities come from: 'cached' computes them once with the start model and "
        "stores them with the data; 'adapter_off' (LoRA only) computes them in each step with the adapters off.",
        choices=REFERENCES,
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        smoothing = self.label_smoothing
        mistakes.require(
            smoothing == 0 or self.loss_type == "sigmoid",
            f"--label_smoothing {smoothing} needs --loss_type sigmoid: '{self.loss_type}' has no such form",
        )


def check_reference(flags: OneModelFlags) -> None:
    """Raise ThreestepError if the reference is to be read from a model whose own weights train."""
    model = flags.model
    if flags.own.reference == "adapter_off" and not (model.lora_dim > 0 and model.only_optimize_lora):
        raise ThreestepError(
            "--reference adapter_off needs --lora_dim above 0 and --only_optimize_lora true: without its adapters a "
            "model is its own reference only if nothing but they train; use --reference cached"
        )
