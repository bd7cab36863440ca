"""Reads for a head, in a model's own forward: states for a head beside it, log-probabilities of a head inside it.

Where ranks share rows, a head reads this rank's part, and log-probabilities are of all targets as the model's are.

M targets of one depth, L slots of all rows (and what fills the last block), or of a part of them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.utils.models.row_sharing import WHOLE_ROWS, RowPart
from training.utils.models.token_model import of_group

if TYPE_CHECKING:
    from threestep.plugins.mtp.layout.entries import MtpEntries
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.token_model import PolicyModel, TokenLogprobs

INSIDE = "mtp_head"  # the head's name inside a PolicyModel, and so in its checkpoints


class TrunkStates(NamedTuple):
    """A model's last states of every slot (and what fills the rows), and its input embeddings of the rows' tokens,
    without noise; detached. part: of the rows, which they are of."""

    hidden_LH: torch.Tensor
    embeddings_LH: torch.Tensor
    part: RowPart = WHOLE_ROWS


def read_states(policy: PolicyModel, rows: TokenRows, hidden_LH: torch.Tensor, part: RowPart) -> TrunkStates:
    """Return what a head beside the model reads."""
    with torch.no_grad():
        embeddings_LH = policy.model.get_input_embeddings()(_ids(rows, part))
    return TrunkStates(hidden_LH.detach(), embeddings_LH, part)


def read_ahead(
    policy: PolicyModel,
    rows: TokenRows,
    hidden_LH: torch.Tensor,
    part: RowPart,
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
    part: RowPart,
    read: Callable[[torch.Tensor, torch.Tensor], TokenLogprobs],
) -> list[TokenLogprobs]:
    """Return the log-probabilities of each depth. states: [M, H], those of `MtpHead.forward`. read: the output layer,
    given states and the ids of their targets."""
    found = []
    for hidden_MH, entry in zip(states, entries, strict=True):
        own = part.owned(entry.rows.predictor_M)
        found.append(of_group(read(hidden_MH, own.of(entry.rows.target_ids_M)), own))
    return found


def _ids(rows: TokenRows, part: RowPart) -> torch.Tensor:
    return part.cut_slots(rows.input_ids_NT.flatten())
