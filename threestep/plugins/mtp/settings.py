"""Settings of a head for multi-token prediction, as one record. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass(frozen=True)
class MtpSettings:
    """layers: modules, each one token further ahead; 0: no head. loss_coef: weight of the mean of their losses.
    final_norm: each ends in a norm. detach: trained beside the model, which does not change; otherwise with it, by one
    loss."""

    layers: int = 0
    loss_coef: float = 0.1
    final_norm: bool = True
    detach: bool = True


def check_beside_adapters(mistakes: Mistakes, settings: MtpSettings, lora_dim: int) -> None:
    """Note a head whose loss is to train all of a model of which only adapters train."""
    mistakes.require(
        settings.detach or not lora_dim,
        f"--mtp_detach false trains the whole model on the head's loss too, but --lora_dim {lora_dim} trains only "
        "adapters; leave one of them out",
    )


def check_mtp(mistakes: Mistakes, settings: MtpSettings) -> None:
    """Note what is set of a head that is not there."""
    mistakes.require(
        settings.layers > 0 or settings.loss_coef == MtpSettings.loss_coef,
        f"--mtp_loss_coef {settings.loss_coef:g} sets the weight of a head's loss, but there is no head; add "
        "--mtp_num_layers 1, or remove --mtp_loss_coef",
    )
    mistakes.require(
        settings.layers > 0 or settings.final_norm,
        "--mtp_final_norm false applies to a head, but there is no head; add --mtp_num_layers 1, or leave "
        "--mtp_final_norm out",
    )
    mistakes.require(
        settings.layers > 0 or settings.detach,
        "--mtp_detach false applies to a head, but there is no head; add --mtp_num_layers 1, or leave --mtp_detach out",
    )
