"""Reads for a head, in a model's own forward: states for a head beside it, log-probabilities of a head inside it.

Where ranks share rows, a head reads this rank's slices, and log-probabilities are of all targets as the model's are.

M targets of one depth, L slots of all rows (and what fills the last block), or of slices of them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.utils.models.token_model import of_group

if TYPE_CHECKING:
    from threestep.plugins.mtp.layout.entries import MtpEntries
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.target_head import TokenLogprobs
    from training.utils.models.token_model import PolicyModel
    from training.utils.sequence_parallel.slices import RowSlice

INSIDE = "mtp_head"  # the head's name inside a PolicyModel, and so in its checkpoints


class TrunkStates(NamedTuple):
    """A model's last states of every slot (and what fills the rows), and its input embeddings of the rows' tokens,
    without noise; detached. part: the slices that they are of; None of whole rows."""

    hidden_LH: torch.Tensor
    embeddings_LH: torch.Tensor
    part: RowSlice | None = None


def read_states(policy: PolicyModel, rows: TokenRows, hidden_LH: torch.Tensor, part: RowSlice | None) -> TrunkStates:
    """Return what a head beside the model reads."""
    with torch.no_grad():
        embeddings_LH = policy.model.get_input_embeddings()(_ids(rows, part))
    return TrunkStates(hidden_LH.detach(), embeddings_LH, part)


def read_ahead(
    policy: PolicyModel,
    rows: TokenRows,
    hidden_LH: torch.Tensor,
    part: RowSlice | None,
    *,
    entries: Sequence[MtpEntries],
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each depth of the head inside the model, with gradients for states, embeddings
    and output layer."""
    head = policy.target_head
    assert head is not None
    embeddings_LH = policy.model.get_input_embeddings()(_ids(rows, part))
    states = policy.get_submodule(INSIDE)(hidden_LH, embeddings_LH, tuple(entries), part)
    return tuple(read_depths(states, entries, part, lambda hidden_MH, ids_M: head(hidden_MH, ids_M)))


def read_depths(
    states: Sequence[torch.Tensor],
    entries: Sequence[MtpEntries],
    part: RowSlice | None,
    read: Callable[[torch.Tensor, torch.Tensor], TokenLogprobs],
) -> list[TokenLogprobs]:
    """Return the log-probabilities of each depth. states: [M, H], those of `MtpHead.forward`. read: the output layer,
    given states and the ids of their targets."""
    found = []
    for hidden_MH, entry in zip(states, entries, strict=True):
        own = None if part is None else part.owned(entry.rows.predictor_M)
        ids_M = entry.rows.target_ids_M if own is None else entry.rows.target_ids_M[own.which_m]
        found.append(of_group(read(hidden_MH, ids_M), own))
    return found


def _ids(rows: TokenRows, part: RowSlice | None) -> torch.Tensor:
    ids_L = rows.input_ids_NT.flatten()
    return ids_L if part is None else part.cut_slots(ids_L)
