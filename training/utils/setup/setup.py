"""Run setup shared by all steps: step counts, loading under ZeRO, whether rows may be packed, the meter of MFU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from training.utils.base.console import counted, log
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.collectives import largest
from training.utils.engine.ranks.devices import free_bytes, peak_of_all_ranks
from training.utils.engine.ranks.startup import Ranks, check_dtype
from training.utils.engine.zero3 import born_sharded
from training.utils.layout.order import steps_in
from training.utils.models.attention import kernel_of, text_attention
from training.utils.models.dropout import check_no_dropout
from training.utils.models.flops import ComputeMeter, model_shape
from training.utils.models.one_precision import to_one_precision

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.config.arguments import EngineArguments, EngineSettings
    from training.utils.engine.training_engine import TrainingEngine


def least_free_bytes(ranks: Ranks) -> int:
    """Return the memory that is free for the rank that has the least. A collective."""
    return -largest(-free_bytes(ranks.device, ranks.world_size, os.environ), ranks.device)


def whole_steps(engine: EngineArguments, rows: int, ranks: Ranks) -> tuple[int, int]:
    """Return (optimizer steps, sequences of each). Raises ThreestepError if the rows do not fill one."""
    assert engine.per_device_train_batch_size is not None, "chosen as the run was opened"
    sequences = engine.per_device_train_batch_size * ranks.groups * engine.gradient_accumulation_steps
    steps = steps_in(rows, engine.num_train_epochs, sequences)
    if steps == 0:
        dealt = ranks_in_words(ranks.world_size, ranks.sharing.size)
        raise ThreestepError(
            f"an optimizer step needs {sequences} sequences (--per_device_train_batch_size "
            f"{engine.per_device_train_batch_size} x {dealt} x --gradient_accumulation_steps "
            f"{engine.gradient_accumulation_steps}), but {counted(engine.num_train_epochs, 'epoch')} of "
            f"{counted(rows, 'training row')} cannot fill it; lower the batch size, or add rows or epochs"
        )
    if engine.max_train_steps is not None:
        steps = min(steps, engine.max_train_steps)
    return steps, sequences


def ranks_in_words(ranks: int, sharing: int) -> str:
    """Among how many rows are dealt: ranks, or groups of `sharing` of them."""
    return counted(ranks, "rank") if sharing == 1 else f"{ranks // sharing} groups of {sharing} ranks"


def may_pack(
    padded: bool,
    model: Any,
    engine: TrainingEngine,
    read: Callable[[TokenRows], torch.Tensor],
    *,
    longest_tokens: int,
    log: Callable[..., None],
    sharing: bool = True,
    needs_segments: str | None = None,
) -> bool:
    """Check what `engine` reads from `model` against the model's own forward, and return whether documents may share
    rows: the user did not ask for padding, and the model can do it. ThreestepError if not even padded rows are right.

    sharing: the documents share prompts
    needs_segments: the flag that gives a document segments which do not see each other, padded or not; ThreestepError
        if the model cannot do that
    """
    from training.utils.models.layout_check import check_padded, check_segments, notes_on, why_not_packed

    name, device, was_training = type(model).__name__, engine.ranks.device, engine.module.training
    engine.eval()
    try:
        check_padded(model, read, device)
        reason = None
        if not padded or needs_segments is not None:
            sharing = sharing or needs_segments is not None
            reason = why_not_packed(model, read, longest_tokens, device, sharing=sharing)
    except ThreestepError as problem:
        if (together := engine.ranks.sharing).size == 1:
            raise
        raise ThreestepError(f"{together.flag} {together.size}: {problem}; try one rank per row") from problem
    finally:
        engine.train(was_training)
    for note in notes_on(model):
        log(f"{name}: {note}", engine.ranks.is_main)
    check_segments(reason, needs_segments, name)
    if reason is not None:
        log(f"warning: {name} trains on padded rows: {reason}", engine.ranks.is_main)
    packs = reason is None and not padded
    if packs and device.type == "cuda" and engine.ranks.is_main:
        _time_attention(engine.module, model, lambda said: log(f"{name}: {said}"))
    return packs


def may_share(
    model: Any, engine: TrainingEngine, read: Callable[[TokenRows], torch.Tensor], longest_tokens: int
) -> bool:
    """Return whether `engine`, which may pack, reads documents that share their beginnings as the model's own forward
    does, and has no dropout, which would fall on all of them alike. A collective."""
    from training.utils.models.layout_check import why_not_packed

    was_training = engine.module.training
    engine.eval()
    try:
        if why_not_packed(model, read, longest_tokens, engine.ranks.device, sharing=True) is not None:
            return False
    finally:
        engine.train(was_training)
    return not differs_in_training(model, engine.ranks)


def differs_in_training(model: PreTrainedModel, ranks: Ranks) -> bool:
    """Return whether the model computes something else in train mode, as with dropout, on any rank. Call it before the
    weights change. A collective."""
    try:
        check_no_dropout(model)
        differs = False
    except ThreestepError:
        differs = True
    return bool(largest(int(differs), ranks.device))


def _time_attention(reader: Any, model: Any, say: Callable[[str], None]) -> None:
    kernel = kernel_of(text_attention(model))
    if kernel is not None and getattr(reader, "model", None) is model:
        kernel.time_first_rows(reader, model, say)


def compute_meter(model: Any, ranks: Ranks) -> ComputeMeter:
    """Measure and log the matmul rate of this machine in the model's precision. A collective."""
    with ranks.backend.held():
        peak = peak_of_all_ranks(model.dtype, ranks.device)
    dtype = str(model.dtype).removeprefix("torch.")
    log(
        f"mfu: matmuls in {dtype} reach {peak / 1e12:.3g} TFLOP/s here; train/mfu is relative to this rate",
        ranks.is_main,
    )
    return ComputeMeter(model_shape(model), peak)


def load_under(settings: EngineSettings, ranks: Ranks, load: Callable[[torch.dtype], Any]) -> Any:
    """Call `load(dtype)`: a ZeRO-3 model is born sharded, any other is moved to this rank's device."""
    dtype = check_dtype(settings.dtype)
    config = engine_config(settings, ranks.world_size, 1, ranks.device.type == "cuda")
    for line in settings.own_config.notes(config) if settings.own_config is not None else ():
        log(line, ranks.is_main)
    with born_sharded(config, settings.zero_stage):
        model = load(dtype)
    to_one_precision(model, dtype)
    return model if settings.zero_stage == 3 else model.to(ranks.device)
