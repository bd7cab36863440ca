"""The settings of a model's adapters, which are added as it is loaded. Cheap to import."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.lora.arguments import LoraArguments, RolesLoraArguments
from training.utils.flags.flags import settings_of
from training.utils.models.preparers import ModelPreparer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.flags.added import AddedFlags
    from training.utils.models.settings import ModelSettings


def preparers(added: AddedFlags, role: str) -> Iterator[ModelPreparer]:
    """Yield what these flags change in models (`Hooks.preparers`)."""
    flags = added.of(RolesLoraArguments) if role else added.of(LoraArguments)
    dim = getattr(flags, f"{role}_lora_dim" if role else "lora_dim")
    if dim:
        alpha = flags.lora_alpha * math.sqrt(dim) if flags.use_rslora else flags.lora_alpha
        yield settings_of(Lora, flags, role, lora_alpha=alpha)


@dataclass(frozen=True)
class Lora(ModelPreparer):
    """Adapters of a rank of 1 or more. The fields are the flags' but for `lora_alpha`: the scale is alpha / rank, also
    with rsLoRA.

    use_dora: adapters have a magnitude for each output of their layer (Liu et al. 2024, arXiv:2402.09353).
    """

    lora_dim: int
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_module_name: str = "all-linear"
    use_dora: bool = False
    only_optimize_lora: bool = True
    lora_learning_rate: float | None = None
    of_counted: ClassVar[bool] = True
    adapts: ClassVar[bool] = True

    @property
    def trained_form(self) -> str:
        return f"LoRA of rank {self.lora_dim}"

    @property
    def keeps_weights(self) -> bool:
        return self.only_optimize_lora

    def add_adapters(self, model: PreTrainedModel) -> None:
        """See `add_lora`."""
        from threestep.plugins.lora.adding import add_lora

        add_lora(model, self)


def lora_of(settings: ModelSettings) -> Lora | None:
    """Return the adapters that a model gets; None for none."""
    return next((each for each in settings.preparers if isinstance(each, Lora)), None)
