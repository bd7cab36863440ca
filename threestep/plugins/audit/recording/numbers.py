"""The numbers of a record: each tensor as the schema has it, and counts and places within what they are of.

The names of axes are those of `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from threestep.plugins.audit.recording.schema import CRITIC, STATES, TENSORS
from training.utils.base.errors import ThreestepError, nearest_names

_KINDS = {"i": "integers", "b": "booleans", "f": "floating-point numbers"}
_COUNTS = ("lengths", "rollout_lengths", "micro_batches", "token_ids", "media_begins", "media_tokens", "media_counts")
_TRAINED = ("gradients.", "clipped_gradients.", "exp_avg.", "exp_avg_sq.", "exp_avg_after.")
_WEIGHTS = ("weights_before.", "weights_after.")
_OF_SEQUENCES = ("chosen", "rejected")  # indices into the sequences of a rank


def check_tensors(tensors: Mapping[str, np.ndarray], where: str) -> None:
    """ThreestepError for a tensor of another name, kind or length than the schema has."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, values in tensors.items():
        known = TENSORS.get(name)
        if known is None:
            raise ThreestepError(f"{where}: unknown tensor '{name}'{nearest_names(name, TENSORS)}")
        if values.dtype.kind != known.kind or values.ndim != len(known.axis):
            raise ThreestepError(
                f"{where}: {name} expects {_KINDS[known.kind]} in {len(known.axis)} dimension(s) [{known.axis}], got "
                f"{values.dtype} {list(values.shape)}"
            )
        size, other = sizes.setdefault(known.axis[0], (len(values), name))
        if size != len(values):
            raise ThreestepError(f"{where}: {name} expects {size:,} entries, as in {other}, got {len(values):,}")
    _check_numbers(tensors, sizes, where)
    for axis, lengths in (("T", "lengths"), ("R", "rollout_lengths")):
        if axis not in sizes:
            continue
        total = int(tensors[lengths].sum()) if lengths in tensors else None
        if total != sizes[axis][0]:
            raise ThreestepError(
                f"{where}: {lengths} must add up to the {sizes[axis][0]:,} entries of {sizes[axis][1]}, "
                f"{'but there is no such tensor' if total is None else f'got {total:,}'}"
            )


def _check_numbers(tensors: Mapping[str, np.ndarray], sizes: Mapping[str, tuple[int, str]], where: str) -> None:
    """sizes: entries along each axis, with the tensor that has them."""
    bounds = {name: np.iinfo(np.int64).max for name in _COUNTS}
    bounds |= dict.fromkeys(_OF_SEQUENCES, sizes["S"][0] - 1 if "S" in sizes else -1)
    if "micro_losses" in tensors:
        bounds["micro_batches"] = sizes["K"][0] - 1
    if "T" in sizes:
        bounds["lengths"] = sizes["T"][0]
    if "logits" in tensors:
        bounds["token_ids"] = tensors["logits"].shape[1] - 1
    for name in bounds.keys() & tensors.keys():
        values, most = tensors[name], bounds[name]
        wrong = values[(values < 0) | (values > most)]
        if wrong.size:
            raise ThreestepError(f"{where}: {name} expects numbers from 0 to {most:,}, got {int(wrong[0]):,}")


def check_state(state: Mapping[str, np.ndarray], where: str) -> None:
    """ThreestepError for a name that the schema lacks, and for trained parameters that are not the same, in the same
    shapes, in all that a record has of them. Its weights may be more: frozen ones."""
    names: dict[str, dict[str, np.ndarray]] = {}
    for name, values in state.items():
        kind = next((kind for kind in STATES if name.startswith(kind)), None)
        if kind is None:
            raise ThreestepError(f"{where} expects names that begin with {', '.join(STATES)}, got '{name}'")
        if values.dtype.kind != "f":
            raise ThreestepError(f"{where}: {name} expects floating-point numbers, got {values.dtype}")
        names.setdefault(kind, {})[name.removeprefix(kind)] = values
    for model in ("", CRITIC):
        known = [f"{model}{kind}" for kind in _TRAINED if f"{model}{kind}" in names]
        for kind in [*known, *(f"{model}{kind}" for kind in _WEIGHTS if known and f"{model}{kind}" in names)]:
            _check_alike(names[known[0]], names[kind], f"{where}: {kind}", may_be_more=kind not in known)


def _check_alike(
    first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], where: str, *, may_be_more: bool
) -> None:
    for name in [*first, *(() if may_be_more else other)]:
        shapes = [list(side[name].shape) if name in side else "none" for side in (first, other)]
        if shapes[0] != shapes[1]:
            raise ThreestepError(
                f"{where}{name} expects the shape {shapes[0]}, as in the other tensors of this parameter, got "
                f"{shapes[1]}"
            )
