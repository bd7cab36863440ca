"""Adapters that are given as a model (`loading.weight_files`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from threestep.plugins.lora.folders import AdapterFolder, find_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from threestep.plugins.lora.merging import PeftPlan
    from training.utils.models.settings import ModelSettings


@dataclass(frozen=True)
class PeftAdapter(AdapterFolder):
    """A `GivenAdapter`."""

    def planned(self, make_empty: Callable[[], PreTrainedModel], settings: ModelSettings) -> PeftPlan:
        """See `GivenAdapter.planned`."""
        from threestep.plugins.lora.merging import plan_adapter

        return plan_adapter(self, make_empty, settings)


def find(name_or_path: str) -> PeftAdapter | None:
    """See `find_folder` (`AdapterEntry.find`)."""
    found = find_folder(name_or_path)
    return None if found is None else PeftAdapter(**vars(found))
