"""Slices of a token row for context parallelism, in the order that balances causal attention.

A row is cut into 2 x ranks chunks of equal length, and rank r gets chunks r and 2 * ranks - 1 - r, cheap early and
expensive late, so that every rank attends to equally many tokens (zigzag order, as in Megatron-LM's context parallelism
and zigzag ring attention). Slice ids, labels, masks and positions in the same way. Not for Ulysses sequence
parallelism, which slices contiguously.

Serves users who train with context parallelism in an engine of their own; no program here does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.utils.base.errors import ThreestepError


def zigzag_slice(
    tensor: torch.Tensor, rank: int, ranks: int, pad_value: float | None = None, *, dim: int = 0
) -> torch.Tensor:
    """Return the two chunks of `rank`, concatenated.

    tensor: any dtype, T tokens along `dim`; the result has 2 * ceil(T / (2 * ranks)). One rank gets all of it.
    pad_value: pads `tensor` to a multiple of 2 * ranks (0 for masks, the pad token for ids); None requires one.
    Raises ThreestepError for a rank that does not exist and a T that does not divide.

    >>> row = torch.arange(8)
    >>> [zigzag_slice(row, rank, 2).tolist() for rank in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]

    Ten tokens on two ranks: chunks of ceil(10 / 4) = 3, two tokens of padding at the end.

    >>> [zigzag_slice(torch.arange(10), rank, 2, pad_value=-1).tolist() for rank in (0, 1)]
    [[0, 1, 2, 9, -1, -1], [3, 4, 5, 6, 7, 8]]
    """
    if not 0 <= rank < ranks:
        raise ThreestepError(f"expected a rank from 0 to {ranks - 1}, got {rank}")
    if ranks == 1:
        return tensor
    length = tensor.shape[dim]
    chunk = -(-length // (2 * ranks))
    missing = 2 * ranks * chunk - length
    if missing:
        if pad_value is None:
            raise ThreestepError(
                f"{length} tokens cannot be divided into {2 * ranks} chunks for {ranks} ranks; pad them to "
                f"{length + missing}, or pass a pad_value"
            )
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_full(shape, pad_value)], dim)
    late = 2 * ranks - 1 - rank
    return torch.cat([tensor.narrow(dim, rank * chunk, chunk), tensor.narrow(dim, late * chunk, chunk)], dim)


def zigzag_unslice(slices: Sequence[torch.Tensor], length: int | None = None, dim: int = 0) -> torch.Tensor:
    """Return the row that `slices`, one per rank in the order of ranks, were cut from.

    length: tokens of the row before padding; None keeps the padding.
    Raises ThreestepError if slices differ in length, have an odd length, or hold fewer tokens than `length`.

    >>> zigzag_unslice([torch.tensor([0, 1, 2, 9, -1, -1]), torch.tensor([3, 4, 5, 6, 7, 8])], length=10).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    lengths = [part.shape[dim] for part in slices]
    if len(slices) == 1:
        row = slices[0]
    elif not slices or len(set(lengths)) > 1 or lengths[0] % 2:
        raise ThreestepError(f"expected one slice per rank, all of the same even length, got lengths {lengths}")
    else:
        halves = [part.chunk(2, dim) for part in slices]
        early, late = zip(*halves, strict=True)
        row = torch.cat([*early, *reversed(late)], dim)
    if length is None:
        return row
    if row.shape[dim] < length:
        raise ThreestepError(f"the slices hold {row.shape[dim]} tokens in total, too few for a row of {length}")
    return row.narrow(dim, 0, length)
