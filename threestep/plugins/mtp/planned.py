"""A head in a dry run, which alone calls this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.mtp.head import new_head
from training.utils.base.machine import MemoryLine, Moment
from training.utils.plugins.registry import plugin_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.mtp.settings import MtpSettings
    from training.utils.base.machine import PlannedDevice
    from training.utils.engine.config.arguments import EngineSettings


def plan_head(
    model: PreTrainedModel, mtp: MtpSettings, settings: EngineSettings, ranks: int, *, device: PlannedDevice
) -> tuple[list[str], list[MemoryLine], list[Moment]]:
    """Return a sentence on the head for multi-token prediction beside `model` (on the meta device), what training it
    holds of one rank besides its activations, and its optimizer step; nothing without one. ThreestepError if the model
    cannot have such a head."""
    if not mtp.layers:
        return [], [], []
    head = new_head(model, mtp.layers, seed=0, final_norm=mtp.final_norm)
    _, engine = plugin_module("plan", "dry_run.plan").engine_of(head, settings, ranks, device)
    weights = sum(part.numel() for part in head.parameters())
    sentence, memory = (
        (f"multi-token prediction: a head with {mtp.layers} module{'s' * (mtp.layers > 1)}, {weights:,} weights"),
        engine.named("mtp"),
    )
    return [sentence], [*memory.held], [Moment("in the head's optimizer step", (memory.stepping,))]
