"""The choice of attention for a model's rows if the user names none: by the model's calls of attention and by its
results with it, never by speed, so that every rank and a resumed run choose the same.

On CUDA the order is that of the plugins' kernels, then sdpa; on a CPU runs in turn, sdpa. `layout_check` then checks
the results of a packed row, and takes the next of the order if they are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError, first_line
from training.utils.models.attention import AUTO, SDPA, auto_kernels, kernel_of, set_text_attention, text_attention
from training.utils.models.document_attention import (
    attention_by_document,
    comparisons_with_sdpa,
    use_document_attention,
)
from training.utils.models.own_forward import OwnForward, current_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ANOTHER_NAME = "the switch changes the model's outputs"
_BY_SDPA = "with a dense mask where rows hold several documents"


def settle_attention(
    model: PreTrainedModel, own: OwnForward, wanted: str, dropout: float | None, *, compiled: bool
) -> None:
    """Give a model that was loaded with transformers' own attention, and measured, the one that computes its rows.

    wanted: `--attn_implementation`. dropout: every rate, None for the model's own. compiled: its blocks will be
    compiled, each with the runs of every row anew where attention computes them in turn.
    Raises ThreestepError where what is wanted by name cannot be. Notes what was chosen on CUDA, and each that was not.
    """
    on_cuda, kernel = model.device.type == "cuda", kernel_of(wanted)
    if kernel is not None and kernel.of_transformers:
        kernel.use(model)
    elif kernel is not None:
        reason = kernel.why_not(model, dropout) or _unless_other(model, own, kernel.use)
        if reason is not None:
            raise ThreestepError(f"--attn_implementation {wanted}: {reason}; use auto or sdpa")
    elif wanted == AUTO and on_cuda:
        choose_on_cuda(model, own, dropout)
    elif wanted in (AUTO, SDPA) and not on_cuda and not compiled:
        reason = _unless_other(model, own, use_document_attention)
        if reason is not None:
            own.notes.append(f"attention stays '{text_attention(model)}': {reason}")


def choose_on_cuda(model: PreTrainedModel, own: OwnForward, dropout: float | None) -> None:
    """Take the first of the order that the model can be given, keep the later ones in `own.others`, and note why."""
    loaded = text_attention(model)
    if loaded != SDPA:
        own.notes.append(f"attention is '{loaded}': transformers offers this family no other")
        return
    chosen = ""
    media = None if own.with_media is None else own.with_media.media.name
    # All are asked before one is given: a kernel may read the model.
    asked = [(name, kernel, kernel.why_not(model, dropout) or kernel.why_not_here()) for name, kernel in auto_kernels()]
    for name, kernel, reason in asked:
        if reason is None and media is not None and not kernel.takes_media:
            reason = f"it joins all rows into one, but {media} cannot be joined"
        if chosen:
            own.others.extend([name] if reason is None else [])
            continue
        if reason is None and kernel.of_transformers:
            switch_attention(model, name)
        elif reason is None:
            reason = _unless_other(model, own, kernel.use)
        chosen = name if reason is None else ""
        own.notes.append(f"attention is not {name}: {reason}" if reason else f"attention is {name}: {kernel.why}")
    if chosen:
        own.others.append(SDPA)
    else:
        own.notes.append(f"attention is {SDPA}: {_BY_SDPA}")


def planned_attention(model: PreTrainedModel, wanted: str, on_cuda: bool, dropout: float | None) -> str:
    """Return the attention that a model on the meta device would be given, by its configuration alone: one that the
    check of packed rows then turns down is not known. wanted, dropout: see `settle_attention`."""
    if wanted != AUTO:
        return wanted
    if not on_cuda or text_attention(model) != SDPA:
        return SDPA
    return next((name for name, kernel in auto_kernels() if kernel.why_not(model, dropout) is None), SDPA)


def switch_attention(model: PreTrainedModel, name: str) -> None:
    """Give `model` the attention `name`, which `choose_on_cuda` tried."""
    kernel = kernel_of(name)
    if kernel is None:
        set_text_attention(model, name)
    else:
        kernel.use(model, attention_by_document)


def take_next(model: PreTrainedModel, own: OwnForward, reason: str) -> bool:
    """Give `model` the next attention of the order, because of `reason`; return False if there is none."""
    if not own.others:
        return False
    before, name = text_attention(model), own.others.pop(0)
    switch_attention(model, name)
    kernel = kernel_of(name)
    why = _BY_SDPA if kernel is None else kernel.why
    own.notes.append(f"attention is {name} ({why}) instead of {before}: {reason}")
    return True


def _unless_other(model: PreTrainedModel, own: OwnForward, use: Callable[[PreTrainedModel], None]) -> str | None:
    """Switch by `use`; if the model then computes something else, take that back and return why."""
    loaded = text_attention(model)
    use(model)
    if text_attention(model) == loaded:
        return None
    try:
        with comparisons_with_sdpa(model) as comparing:
            difference = current_difference(model, own)
    except (ThreestepError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # noqa: BLE001 - a family may refuse a name that it does not know by any exception
        set_text_attention(model, loaded)
        return f"its forward then fails ({type(problem).__name__}: {first_line(problem)})"
    if not comparing and difference <= own.tolerance:
        return None
    set_text_attention(model, loaded)
    return _ANOTHER_NAME
