"""The adapters of a model, which are added as it is loaded. Cheap to import."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.lora.arguments import LoraArguments, RolesLoraArguments
from threestep.plugins.lora.settings import LoraSettings
from training.utils.flags.flags import settings_of
from training.utils.models.settings import ModelPreparer

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
class Lora(LoraSettings, ModelPreparer):
    """These adapters, added as a model is loaded."""

    of_counted: ClassVar[bool] = True

    @property
    def adapters(self) -> str:
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
