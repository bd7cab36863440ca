"""A teacher in a dry run, which alone calls this."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threestep.plugins.distillation.head_loss import NUMBERS_PER_LOGIT, rows_of_chunk
from threestep.plugins.distillation.opening import engine_settings, model_settings
from training.utils.base.machine import MemoryLine, Moment
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.startup import DTYPES
from training.utils.engine.zero3 import model_sizes
from training.utils.models.token_model import CHUNK_BYTES
from training.utils.plugins.registry import plugin_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.distillation.settings import TeacherSettings
    from training.utils.base.machine import PlannedDevice
    from training.utils.engine.config.arguments import EngineSettings


def plan_teacher(
    student: PreTrainedModel, teacher: TeacherSettings, settings: EngineSettings, ranks: int, *, device: PlannedDevice
) -> tuple[list[str], list[MemoryLine], list[Moment]]:
    """Return a sentence on the teacher of `student` (on the meta device), what it holds of one rank besides its
    activations, and its forward under ZeRO-3; nothing without one. settings: of the student's engine."""
    if teacher.name_or_path is None:
        where = teacher.file or teacher.url
        return [] if where is None else [f"teacher: {where}"], [], []
    engine, counted = engine_settings(teacher, settings), plugin_module("plan", "dry_run.engine_memory")
    model = plugin_module("plan", "dry_run.meta").model_on_meta(model_settings(teacher), DTYPES[engine.dtype])
    sizes = [part.numel() for part in model.parameters()]
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    moments = []
    if engine.zero_stage == 3:
        whole = model_sizes(model)
        limits = plugin_module("plan", "dry_run.plan").planned_limits(whole, engine, ranks, device)
        zero = engine_config(engine, ranks, 1, device.is_cuda, limits=limits)["zero_optimization"]
        gathered = counted.ELEMENT_BYTES[engine.dtype] * counted.gathered_elements(
            sum(sizes), whole.module, zero, trains=False
        )
        moments = [Moment("in a forward pass of the teacher", (MemoryLine("teacher: gathered weights", gathered),))]
    lines = (
        counted.weights_memory(sum(sizes), engine.dtype, zero, ranks),
        counted.pinned_shards(sizes, engine.dtype, zero, ranks),
    )
    held = [replace(line, name=f"teacher: {line.name}") for line in lines]
    head: Any = student.get_output_embeddings()
    chunk = 4 * NUMBERS_PER_LOGIT * rows_of_chunk(CHUNK_BYTES, len(head.weight)) * len(head.weight)
    trained = head.weight.numel() if head.weight.requires_grad else 0
    gradient = counted.ELEMENT_BYTES[settings.dtype] * trained
    held.append(MemoryLine("teacher: a chunk of logits, the gradient of the output layer", chunk + gradient))
    return [f"teacher: {teacher.name_or_path}, {sum(sizes):,} weights"], held, moments
