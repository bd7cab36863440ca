"""The loss of a head in rows that are rolled, as Megatron and Slime train it: the reference that entries without a
shift are tested against, and the path for whoever has rows of that form. Serves trainers that roll ids and masks.

At depth k, slot i of a sequence holds h_i, the embedding of token i + k, and the target i + k + 1. Ids and mask are
shifted left inside each sequence, never over its end: a roll over the whole row would have the last token of one
predict the first of the next. The mask marks the tokens that are predicted (`mtp.layout.masks`), and is rolled as the
targets are.

T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from threestep.plugins.mtp.head import MtpHead
    from training.utils.contracts.token_rows import TokenRows


class Rolled(NamedTuple):
    """Input and targets of one depth. embedded_1T, target_1T: int64, 0 without any. mask_1T: bool, what is trained."""

    embedded_1T: torch.Tensor
    target_1T: torch.Tensor
    mask_1T: torch.Tensor


def rolled(ids_1T: torch.Tensor, mask_1T: torch.Tensor, lengths: Sequence[int], depth: int) -> Rolled:
    """Return what slot i holds at `depth`.

    mask_1T: True on tokens to be predicted. lengths: of the row's sequences; what follows them is padding.

    Worked example, two sequences in a row of eight, depth 1, responses marked:

    >>> ids, mask = torch.tensor([[5, 6, 7, 8, 1, 2, 3, 0]]), torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0]]).bool()
    >>> [part.int().tolist() for part in rolled(ids, mask, [4, 3], 1)]
    [[[6, 7, 8, 0, 2, 3, 0, 0]], [[7, 8, 0, 0, 3, 0, 0, 0]], [[1, 1, 0, 0, 1, 0, 0, 0]]]
    """
    return Rolled(_left(ids_1T, lengths, depth), *(_left(part, lengths, depth + 1) for part in (ids_1T, mask_1T)))


def rolled_logprob_sums(
    head: MtpHead,
    embeddings: torch.nn.Module,
    output_layer: torch.nn.Linear,
    hidden_TH: torch.Tensor,
    *,
    rows: TokenRows,
    mask_1T: torch.Tensor,
    lengths: Sequence[int],
) -> list[tuple[torch.Tensor, int]]:
    """Return, for each depth, the sum of the log-probabilities of what the mask marks, and how many there are.

    rows: one row of these sequences, without shared prompts. hidden_TH: the model's last states.
    """
    found = []
    for depth, module in enumerate(head.depths, start=1):
        here = rolled(rows.input_ids_NT, mask_1T, lengths, depth)
        # Positions count from the token that is embedded.
        placed = replace(rows, position_ids_NT=rows.position_ids_NT + depth)
        hidden_TH = module(embeddings(here.embedded_1T[0]).detach(), hidden_TH, placed)
        logits_MV = torch.nn.functional.linear(hidden_TH[here.mask_1T[0]], output_layer.weight.detach())
        targets_M = here.target_1T[here.mask_1T]
        logprobs_MV = torch.log_softmax(logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), dim=-1)
        found.append((logprobs_MV.gather(-1, targets_M.unsqueeze(-1)).sum(), len(targets_M)))
    return found


def _left(row_1T: torch.Tensor, lengths: Sequence[int], by: int) -> torch.Tensor:
    """Shift each sequence left, and fill with 0."""
    moved = torch.zeros_like(row_1T)
    start = 0
    for length in lengths:
        kept = max(0, length - by)
        moved[0, start : start + kept] = row_1T[0, start + length - kept : start + length]
        start += length
    return moved
