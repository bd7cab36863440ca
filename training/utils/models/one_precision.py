"""Weights that a family keeps in float32 whatever the precision of the model (routers, norms, state-space decays):
DeepSpeed trains all weights in one precision, without a warning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from training.utils.models.own_forward import own_forward_of, read_again
from training.utils.models.weights import adapters_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ROUNDS = "DeepSpeed rounds"  # how the note begins
ROUNDED = "_threestep_rounded"  # an attribute of the weights that were rounded when they were sharded


def to_one_precision(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights that a loaded model keeps in float32 to `dtype`, as DeepSpeed would, and measure its own
    forward anew; a note names them, and how far its numbers moved. A ZeRO-3 model, whose weights were rounded when
    they were sharded, only gets the note."""
    names = _float32_names(model, dtype)
    if not names:
        return
    measured = own_forward_of(model)
    assert measured is not None, "it was measured when it was loaded"
    plain_name, short = adapters_of(model).plain_name, str(dtype).removeprefix("torch.")
    kinds = sorted({re.sub(r"\d+", "*", plain_name(name)) for name in names})
    note = f"{ROUNDS} {len(names)} weights that the model family keeps in float32 to {short} ({', '.join(kinds[:4])})"
    if not hasattr(next(model.parameters()), "ds_id"):
        for name in names:
            weight = model.get_parameter(name)
            weight.data = weight.data.to(dtype)
        moved = read_again(model)
        what = "scores" if measured.of_scores else "log-probabilities"
        note += f": its {what} move by {moved:.2g} (rounding elsewhere explains {measured.tolerance:.2g})"
    now = own_forward_of(model)
    assert now is not None
    now.notes.append(f"{note}; --dtype fp32 keeps them")


def _float32_names(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """The names of the weights that transformers does not load in `dtype`: those that a list of the family names
    (`_keep_in_fp32_modules`, 5.19), and those that its constructor makes in float32. Shards know of the latter by
    ROUNDED."""
    listed = re.compile("|".join(part.replace("*", ".*") for part in model._get_dtype_plan(dtype)) or "$^")
    adapters = adapters_of(model)
    return [
        name
        for name, weight in model.named_parameters()
        if not adapters.holds(name)
        and (
            (weight.is_floating_point() and weight.dtype is not dtype)
            or hasattr(weight, ROUNDED)
            or (hasattr(weight, "ds_id") and listed.search(adapters.plain_name(name)))
        )
    ]
