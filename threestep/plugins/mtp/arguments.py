"""The flags of a head for multi-token prediction, of steps that have them as a group. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from threestep.plugins.mtp.settings import MtpSettings, check_mtp
from training.utils.flags.flags import flag, flag_of

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class MtpArguments:
    """Multi-token prediction: a head that is trained beside the actor."""

    mtp_num_layers: int = flag(
        MtpSettings.layers,
        "Number of modules (usually 1) in a multi-token-prediction head trained alongside the model; 0 trains none. "
        "If the model's folder already contains a head (also under the tensor names of public checkpoints), training "
        "starts from it.",
        "layers >= 0",
        topic="model",
    )
    # 0.1 is DeepSeek-V3's weight for the last third of its pre-training, and what AReaL and Megatron take.
    mtp_loss_coef: float = flag(
        MtpSettings.loss_coef,
        "Weight of the head's loss (DeepSeek-V3, arXiv:2412.19437, section 4.2, uses 0.3 and later 0.1).",
        "factor > 0",
        topic="policy",
    )
    mtp_final_norm: bool = flag(
        MtpSettings.final_norm,
        "End each module with a norm before the output layer; false omits this norm, as in ERNIE-4.5, which vLLM can "
        "also run alongside a Llama model.",
        topic="model",
    )
    mtp_detach: bool = flag(
        MtpSettings.detach,
        "Train only the head and leave the model unchanged; false trains both on the sum of their losses, as "
        "DeepSeek-V3 does, which changes the model (step 1 only).",
        topic="policy",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_mtp(mistakes, self.settings())
        mistakes.require(
            self.mtp_detach,
            "--mtp_detach false also trains the model on the head's loss. In this step, that would make every "
            "response more likely, whatever its score; train both jointly in step 1, or remove --mtp_detach",
        )

    def settings(self) -> MtpSettings:
        return MtpSettings(self.mtp_num_layers, self.mtp_loss_coef, self.mtp_final_norm, self.mtp_detach)


@dataclass
class SftMtpArguments:
    """The same in step 1, which can train both by one loss."""

    mtp_num_layers: int = flag_of(MtpArguments, topic="loss")
    mtp_loss_coef: float = flag_of(MtpArguments, topic="loss")
    mtp_final_norm: bool = flag_of(MtpArguments, topic="loss")
    mtp_detach: bool = flag_of(MtpArguments, topic="loss")

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_mtp(mistakes, self.settings())

    def settings(self) -> MtpSettings:
        return MtpSettings(self.mtp_num_layers, self.mtp_loss_coef, self.mtp_final_norm, self.mtp_detach)
