"""Loss masks for multi-token prediction: response masks widened to the packed row.

Heads that predict several tokens ahead read the whole row. As everywhere in Threestep, a mask marks the token that is
predicted: a head that predicts d tokens ahead shifts ids and mask left by d, within each sequence. Prompt tokens are 0.
(slime's MTP training builds the same mask.) Serves users who train such heads in a loop of their own; no program here
does.

T tokens in the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from threestep.plugins.mtp.layout.context_slices import zigzag_slice
from training.utils.base.errors import ThreestepError


def whole_row_mask(
    response_masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    row_tokens: int,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> torch.Tensor:
    """Return the loss mask [1, T] of a packed row, in the dtype of `response_masks`.

    response_masks: one per sequence in the order of the row, [response_length].
    total_lengths: tokens of prompt and response.
    row_tokens: T; the rest after the sequences is padding, 0.
    rank, ranks: of context parallelism: each sequence is sliced (`zigzag_slice`), and T counts this rank's tokens.
    Raises ThreestepError if counts, lengths or dtypes disagree, or if the sequences are longer than the row.

    Two sequences of eight tokens, whose responses have three and four:

    >>> masks = [torch.tensor([1, 1, 1]), torch.tensor([1, 1, 1, 1])]
    >>> whole_row_mask(masks, [8, 8], [3, 4], row_tokens=16).tolist()
    [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]]

    In a row of twenty, and what two ranks of context parallelism each get of it in a row of ten:

    >>> whole_row_mask(masks, [8, 8], [3, 4], row_tokens=20).tolist()
    [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    >>> whole_row_mask(masks, [8, 8], [3, 4], row_tokens=10, rank=0, ranks=2).tolist()
    [[0, 0, 1, 1, 0, 0, 1, 1, 0, 0]]
    >>> whole_row_mask(masks, [8, 8], [3, 4], row_tokens=10, rank=1, ranks=2).tolist()
    [[0, 0, 0, 1, 0, 0, 1, 1, 0, 0]]
    """
    if not len(response_masks) == len(total_lengths) == len(response_lengths):
        raise ThreestepError(
            "expected the same number of response masks, total lengths and response lengths, got "
            f"{len(response_masks)}, {len(total_lengths)} and {len(response_lengths)}"
        )
    if not response_masks:
        raise ThreestepError("a row needs at least one sequence, got none")
    dtypes = {mask.dtype for mask in response_masks}
    if len(dtypes) > 1:
        raise ThreestepError(
            f"all response masks in a row must have the same dtype, got {', '.join(sorted(map(str, dtypes)))}"
        )
    parts = []
    for index, (mask, total, response) in enumerate(zip(response_masks, total_lengths, response_lengths, strict=True)):
        if mask.numel() != response or response > total:
            raise ThreestepError(
                f"sequence {index}: got a mask of {mask.numel()} tokens for a response of {response} tokens in a "
                f"sequence of {total}; the mask must be as long as the response, and the response no longer than "
                "the sequence"
            )
        whole = mask.new_zeros(total)
        whole[total - response :] = mask
        parts.append(zigzag_slice(whole, rank, ranks, pad_value=0))
    tokens = sum(part.numel() for part in parts)
    if tokens > row_tokens:
        raise ThreestepError(f"sequences of {tokens} tokens in total do not fit in a row of {row_tokens}")
    return torch.cat([*parts, parts[0].new_zeros(row_tokens - tokens)]).unsqueeze(0)
