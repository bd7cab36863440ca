"""The flags of direct preference optimisation that no other step has. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.preference.arguments import reference_field
from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag

LOSS_TYPES = ("sigmoid", "ipo", "hinge")


@dataclass
class DpoArguments:
    """Direct preference optimisation."""

    learning_rate: float = flag(1e-6, "Peak learning rate (Rafailov et al. 2023, app. B).", above=0)
    beta: float = flag(
        0.1,
        "How much leaving the reference costs (Rafailov et al. 2023, app. B); ipo regresses on 1/(2 beta).",
        above=0,
    )
    loss_type: str = flag(
        "sigmoid",
        "'sigmoid' is DPO (Rafailov et al. 2023), 'ipo' its squared form on log-probabilities a token "
        "(Azar et al. 2023), 'hinge' SLiC's (Zhao et al. 2023).",
        choices=LOSS_TYPES,
    )
    label_smoothing: float = flag(
        0.0, "sigmoid alone: the share of pairs taken to be ranked wrongly (conservative DPO).", least=0, below=0.5
    )
    sft_coef: float = flag(
        0.0, "Weight of the best response's negative log-likelihood a token (Pang et al. 2024).", least=0
    )
    reference: str = reference_field()

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        smoothing = self.label_smoothing
        mistakes.require(
            smoothing == 0 or self.loss_type == "sigmoid",
            f"--label_smoothing {smoothing} needs --loss_type sigmoid: '{self.loss_type}' has no such form",
        )
