"""The choice of fused operations for a model: where it then computes what its own forward computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from threestep.plugins.speed.fused.operations import fuse, liger_kernels, unfuse
from training.utils.base.errors import ThreestepError, first_line
from training.utils.models.own_forward import OwnForward, current_difference, read_again

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "liger_kernel"


def settle_kernels(model: PreTrainedModel, own: OwnForward, wanted: bool | None) -> None:
    """Fuse what can be, if the model then computes the same; note how much, or why not.

    wanted: `--use_liger_kernel`; None: where there is a CUDA device and the package. Raises ThreestepError where they
    are wanted and cannot be.
    """
    if wanted is False or (wanted is None and not is_on_cuda(model)):
        return
    try:
        reason, count = _fused_or_why(model, own)
    except ImportError as problem:
        if wanted is None and getattr(problem, "name", None) == PACKAGE:
            return
        reason = (
            f"liger-kernel cannot be imported ({first_line(problem)}); in the checkout, run pip install -e '.[liger]'"
        )
        count = 0
    if reason is None:
        own.notes.append(f"norms, gates and rotations use Liger's kernels in {count} modules")
        read_again(model)  # packed rows are held against this forward: two roundings would be taken for another layout
    elif wanted:
        raise ThreestepError(f"--use_liger_kernel: {reason}; leave --use_liger_kernel out")
    else:
        own.notes.append(f"norms, gates and rotations use the model's own kernels: {reason}")


def is_on_cuda(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda"


def _fused_or_why(model: PreTrainedModel, own: OwnForward) -> tuple[str | None, int]:
    """Return None and how many parts were fused, or why none was. ImportError where the package cannot be imported."""
    if not is_on_cuda(model):
        return "it needs a CUDA device, but there is none here", 0
    parts = fuse(model, liger_kernels())
    if not parts:
        return f"no part of {type(model).__name__} matches what these kernels compute", 0
    reason = None
    try:
        difference = current_difference(model, own)
        if not difference <= own.tolerance:
            reason = (
                f"its log-probabilities or scores change by {difference:.2g} (rounding explains {own.tolerance:.2g})"
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # noqa: BLE001 - whatever a compiler of kernels raises
        reason = f"they fail here ({type(problem).__name__}: {first_line(problem)})"
    if reason is not None:
        unfuse(parts)
    return reason, len(parts)
