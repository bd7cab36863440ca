"""Reads for a head, in a model's own forward: states for a head beside it, log-probabilities of a head inside it.

M targets of one depth, L slots of all rows (and what fills the last block), H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.target_head import TokenLogprobs
    from training.utils.models.token_model import PolicyModel
    from training.utils.mtp.layout.entries import MtpEntries

INSIDE = "mtp_head"  # the head's name inside a PolicyModel, and so in its checkpoints


class TrunkStates(NamedTuple):
    """A model's last states of every slot (and what fills the rows), and its input embeddings of the rows' tokens,
    without noise; detached."""

    hidden_LH: torch.Tensor
    embeddings_LH: torch.Tensor


def read_states(policy: PolicyModel, rows: TokenRows, hidden_LH: torch.Tensor) -> TrunkStates:
    """Return what a head beside the model reads."""
    with torch.no_grad():
        embeddings_NTE = policy.model.get_input_embeddings()(rows.input_ids_NT)
    return TrunkStates(hidden_LH.detach(), embeddings_NTE.flatten(0, 1))


def read_ahead(
    policy: PolicyModel, rows: TokenRows, hidden_LH: torch.Tensor, *, entries: Sequence[MtpEntries]
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each depth of the head inside the model, with gradients for states, embeddings
    and output layer."""
    assert policy.target_head is not None
    embeddings_NTE = policy.model.get_input_embeddings()(rows.input_ids_NT)
    states = policy.get_submodule(INSIDE)(hidden_LH, embeddings_NTE.flatten(0, 1), tuple(entries))
    return tuple(
        policy.target_head(hidden_MH, entry.rows.target_ids_M, 1.0, False)
        for hidden_MH, entry in zip(states, entries, strict=True)
    )
