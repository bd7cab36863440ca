"""Hashes and sums: the same for any layout of the same sequences, and another for any change."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from threestep.plugins.audit.recording.hashes import (
    bit_sum,
    end_keys,
    float_hash,
    float_sums,
    mixed,
    random_states_hash,
    target_keys,
    token_keys,
    tokens_hash,
)
from training.utils.contracts.documents import TokenSequence
from training.utils.layout.rows import padded_rows

pytestmark = pytest.mark.unit


def rows(*sequences: list[int]):
    own = [TokenSequence(torch.tensor(ids), torch.arange(len(ids)) > 0) for ids in sequences]
    return padded_rows(own, 0)


def hash_of(*sequences: list[int]) -> tuple[int, int]:
    own = rows(*sequences)
    keys_NT = token_keys(own)
    return int(tokens_hash(own, keys_NT)), int(target_keys(own, keys_NT).sum())


def test_mixed_is_splitmix():
    value = 12345
    expected = value * 0xBF58476D1CE4E5B9 % 2**64
    signed = expected - 2**64 if expected >> 63 else expected
    expected = (signed ^ signed >> 31) * 0x94D049BB133111EB % 2**64
    signed = expected - 2**64 if expected >> 63 else expected
    assert mixed(torch.tensor([value])).tolist() == [signed ^ signed >> 29]


def test_padding_and_order_change_nothing():
    whole = hash_of([5, 6, 7], [8, 9])
    parts = [hash_of([8, 9]), hash_of([5, 6, 7])]
    assert whole == tuple(sum(each) - (2**64 if sum(each) >= 2**63 else 0) for each in zip(*parts, strict=True)) or all(
        (whole[place] - parts[0][place] - parts[1][place]) % 2**64 == 0 for place in (0, 1)
    )


@pytest.mark.parametrize("other", [([5, 6, 8], [8, 9]), ([5, 7, 6], [8, 9]), ([5, 6, 7], [9, 8]), ([5, 6, 7],)])
def test_another_token_or_place_is_another_hash(other):
    assert hash_of([5, 6, 7], [8, 9]) != hash_of(*other)


def test_a_bit_of_a_float_counts():
    values, keys = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 8, 9])
    moved = torch.nextafter(values, torch.tensor(9.0))
    assert float_hash(values, keys) == float_hash(values.flip(0), keys.flip(0)) != float_hash(moved, keys)
    assert float_hash(values, keys) != float_hash(values.flip(0), keys) and bit_sum(values) != bit_sum(moved)


def test_the_sums_of_floats():
    keys = torch.tensor([1 << 20, 0, 3 << 20, 5])
    values = torch.tensor([1.0, 2.0, 4.0, float("nan")])
    assert float_sums(values, keys).tolist() == [3.0, 7.0, 21.0, 1.0 - 2.0 + 4.0]


def test_ends_have_a_key_each():
    own = rows([5, 6, 7], [8, 9])
    keys_NT = token_keys(own)
    assert end_keys(own, keys_NT).tolist() == [int(keys_NT[0, 2]), int(keys_NT[1, 1])]


def test_every_generator_counts():
    seen = [random_states_hash(0), random_states_hash(1)]
    assert random_states_hash(0) == seen[0]
    for draw in (random.random, numpy.random.random, lambda: torch.rand(1)):
        draw()
        seen.append(random_states_hash(0))
    assert len(set(seen)) == len(seen)
