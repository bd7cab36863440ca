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
        "Train a head for multi-token prediction beside the model, of this many modules (usually 1); 0 trains none. It "
        "starts from the model's own head, if its folder has one, under the names of public checkpoints too.",
        "layers >= 0",
        topic="model",
    )
    # 0.1 is DeepSeek-V3's weight for the last third of its pre-training, and what AReaL and Megatron take.
    mtp_loss_coef: float = flag(
        MtpSettings.loss_coef,
        "Weight of the head's loss (DeepSeek-V3, arXiv:2412.19437, section 4.2: 0.3, later 0.1).",
        "factor > 0",
        topic="policy",
    )
    mtp_final_norm: bool = flag(
        MtpSettings.final_norm,
        "End each module in a norm before the output layer; false builds the head that vLLM runs as ERNIE-4.5's, "
        "beside a Llama too, which has none.",
        topic="model",
    )
    mtp_detach: bool = flag(
        MtpSettings.detach,
        "Train the head beside the model, which stays that of a run without it; false trains both by the sum of their "
        "losses, as DeepSeek-V3 does, which changes the model (step 1).",
        topic="policy",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_mtp(mistakes, self.settings())
        mistakes.require(
            self.mtp_detach,
            "--mtp_detach false trains the model by the head's loss too, and this step trains it by its reward: every "
            "response would become more likely, whatever its score; train both in step 1, or leave it out",
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
