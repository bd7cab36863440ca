"""Sums that tell two batches apart: hashes of integers and of the bits of floats, which add up over rows, ranks and
micro-batches in any order, and a few sums of the floats themselves. All stay on the device.

N rows, T tokens in a row, M tokens to be predicted.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows

# Odd factors of splitmix64 (Steele, Lea and Flood 2014), as signed numbers: products wrap around.
_FACTORS = (-4658895280553007687, -7723592293110705685)
_KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MASK = 2**64 - 1


def mixed(values: torch.Tensor) -> torch.Tensor:
    """Return int64 hashes of int64 `values`, each by itself."""
    values = values * _FACTORS[0]
    values = (values ^ (values >> 31)) * _FACTORS[1]
    return values ^ (values >> 29)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of each number as an integer."""
    return values.detach().contiguous().view(_KINDS[values.element_size()])


def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """Return int64 []: the sum of the bits of all numbers."""
    return bits(values).sum(dtype=torch.int64)


def token_keys(rows: TokenRows) -> torch.Tensor:
    """Return int64 [N, T]: a key of each token, of itself and its position."""
    return mixed(rows.position_ids_NT * _FACTORS[1] + rows.input_ids_NT + 1)


def tokens_hash(rows: TokenRows, keys_NT: torch.Tensor) -> torch.Tensor:
    """Return int64 []: of every token, counted once for each sequence that holds it: the same for any layout of the
    same sequences, and padding does not count. keys_NT: `token_keys`."""
    return (keys_NT * rows.copies_NT()).sum()


def target_keys(rows: TokenRows, keys_NT: torch.Tensor) -> torch.Tensor:
    """Return int64 [M]: a key of each token to be predicted, of itself, the token before and the position."""
    return mixed(keys_NT.flatten()[rows.predictor_M] + rows.target_ids_M)


def end_keys(rows: TokenRows, keys_NT: torch.Tensor) -> torch.Tensor:
    """Return int64 [B]: a key of the end of each sequence."""
    return keys_NT.flatten()[rows.end_B]


def float_hash(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return int64 []: of the bits of each number with its key."""
    return mixed(bits(values).to(torch.int64) + keys).sum()


def float_sums(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return float64 [4]: how many numbers are finite, their sum, the sum of their squares, and their sum with a sign
    for each by its key."""
    count = values.isfinite().sum().double()
    values = values.detach().double().nan_to_num(0.0, 0.0, 0.0)
    signed = torch.where((keys & 1 << 20) != 0, values, -values)
    return torch.stack([count, values.sum(), values.square().sum(), signed.sum()])


def random_states_hash(rank: int) -> int:
    """Return a hash of the states of this rank's generators: Python's, NumPy's and torch's, those of GPUs too."""
    import numpy
    import xxhash

    found = xxhash.xxh3_64(seed=rank)
    _, own_words, gauss = random.getstate()
    found.update(hash(own_words).to_bytes(8, "big", signed=True) + repr(gauss).encode())
    state: Any = numpy.random.get_state()
    _, words, *rest = state
    found.update(words.tobytes() + repr(rest).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():
        found.update(torch.cuda.get_rng_state().numpy().tobytes())
    return found.intdigest()
