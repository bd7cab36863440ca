"""The flags of a head for multi-token prediction, of steps that have them as a group. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.utils.flags.flags import flag
from training.utils.mtp.settings import COEF_HELP, DETACH_HELP, LAYERS_HELP, NORM_HELP, MtpSettings, check_mtp

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class MtpArguments:
    """Multi-token prediction: a head that is trained beside the actor."""

    mtp_num_layers: int = flag(MtpSettings.layers, LAYERS_HELP, least=0, unit="layers", topic="model")
    mtp_loss_coef: float = flag(MtpSettings.loss_coef, COEF_HELP, above=0, unit="factor", topic="policy")
    mtp_final_norm: bool = flag(MtpSettings.final_norm, NORM_HELP, topic="model")
    mtp_detach: bool = flag(MtpSettings.detach, DETACH_HELP, topic="policy")

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
