"""The flags of direct preference optimisation that no other step has. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.models.arguments import ModelArguments
from training.utils.run.errors import Mistakes, ThreestepError

LOSS_TYPES = ("sigmoid", "ipo", "hinge")
REFERENCES = ("cached", "adapter_off")


@dataclass
class DpoArguments:
    """Direct preference optimisation."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate (Rafailov et al. 2023, app. B)."})
    beta: float = field(
        default=0.1,
        metadata={
            "help": "How much leaving the reference costs (Rafailov et al. 2023, app. B); ipo regresses on 1/(2 beta)."
        },
    )
    loss_type: str = field(
        default="sigmoid",
        metadata={
            "help": "'sigmoid' is DPO (Rafailov et al. 2023), 'ipo' its squared form on log-probabilities a token "
            "(Azar et al. 2023), 'hinge' SLiC's (Zhao et al. 2023)."
        },
    )
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "sigmoid alone: the share of pairs taken to be ranked wrongly (conservative DPO)."},
    )
    sft_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of the best response's negative log-likelihood a token (Pang et al. 2024)."},
    )
    reference: str = field(
        default="cached",
        metadata={
            "help": "'cached' reads the responses once, with the model as it starts, and keeps the result with the "
            "data; 'adapter_off', with LoRA, reads them in each step with the adapters off."
        },
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        for flag in ("learning_rate", "beta"):
            got = getattr(self, flag)
            mistakes.require(got > 0, f"--{flag} expects more than 0, got {got}")
        for flag, choices in (("loss_type", LOSS_TYPES), ("reference", REFERENCES)):
            mistakes.require_one_of(f"--{flag}", getattr(self, flag), choices)
        mistakes.require(self.sft_coef >= 0, f"--sft_coef expects 0 or more, got {self.sft_coef}")
        smoothing = self.label_smoothing
        mistakes.require(
            0 <= smoothing < 0.5, f"--label_smoothing expects a share from 0 up to below 0.5, got {smoothing}"
        )
        mistakes.require(
            smoothing == 0 or self.loss_type == "sigmoid",
            f"--label_smoothing {smoothing} needs --loss_type sigmoid: '{self.loss_type}' has no such form",
        )

    def check_reference(self, model: ModelArguments) -> None:
        """ThreestepError where the reference is to be read from a model whose own weights are to train."""
        if self.reference == "adapter_off" and not (model.lora_dim > 0 and model.only_optimize_lora):
            raise ThreestepError(
                "--reference adapter_off needs --lora_dim above 0 and --only_optimize_lora true: without its adapters "
                "a model is its own reference only where nothing but they train; use --reference cached"
            )
