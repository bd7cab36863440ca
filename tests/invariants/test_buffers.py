"""A model is the same function at every ZeRO stage in half precision, and in every copy that is made of it: buffers
such as rotary frequencies keep the precision that plain transformers gives them."""

from __future__ import annotations

import pytest

from tests.invariants import buffers_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine

COPIES = ("loaded", "engine", "frozen", "lent", "saved", "carried")
EVERY = [
    pytest.param(size, family, marks=[] if family in buffers_program.ORDINARY[size] else [pytest.mark.long])
    for size in (1, 2)
    for family in buffers_program.FAMILIES
]


@pytest.mark.parametrize("world_size, family", EVERY)
def test_buffers_keep_their_precision(launched, world_size, family):
    found = launched("buffers_program", world_size)[1][0][family]
    differing = {(stage, copy): names for stage in found for copy in COPIES if (names := found[stage].get(copy))}
    stages = {str(stage) for stage in buffers_program.STAGES[world_size]}
    assert set(found) == {*stages, "fp16"} and not differing


@pytest.mark.parametrize("world_size, family", EVERY)
def test_every_stage_and_copy_is_the_same_function(launched, world_size, family):
    """From 2 to 3 and back, too: a folder that one stage saves is the same at each."""
    found = launched("buffers_program", world_size)[1][0][family]
    for stage in map(str, buffers_program.STAGES[world_size]):
        for tokens, by_reader in found[stage]["read"].items():
            for reader, logprobs in by_reader.items():
                assert logprobs == by_reader["plain"], (stage, tokens, reader)


@pytest.mark.parametrize("world_size, family", EVERY)
def test_what_is_saved_is_what_was_trained(launched, world_size, family):
    found = launched("buffers_program", world_size)[1][0][family]
    for stage in map(str, buffers_program.STAGES[world_size]):
        for tokens, by_reader in found[stage]["trained"].items():
            assert by_reader["engine"] != found[stage]["read"][tokens]["engine"]  # something was trained
            assert by_reader["saved"] == by_reader["engine"] == by_reader["lent"], (stage, tokens)
