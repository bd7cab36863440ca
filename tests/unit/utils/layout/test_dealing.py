"""Dealing documents to ranks: whole, in equal counts where asked for, and the busiest as near the mean as can be."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from training.utils.layout import dealing
from training.utils.layout.dealing import dealt, least_tokens

LENGTHS = st.lists(st.integers(1, 600), max_size=40)


def tokens(lengths: list[int], shares: list[list[int]]) -> list[int]:
    return [sum(lengths[document] for document in share) for share in shares]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_every_document_is_dealt_once_and_counts_are_equal_where_asked_for(lengths, ranks, equal_counts):
    shares = dealt(lengths, ranks, equal_counts)
    assert len(shares) == ranks and sorted(itertools.chain(*shares)) == list(range(len(lengths)))
    found = tokens(lengths, shares)
    assert found == sorted(found, reverse=True) and found[0] >= least_tokens(lengths, ranks, equal_counts)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1 or not equal_counts
    assert dealt(lengths, ranks, equal_counts) == shares


@settings(max_examples=60, deadline=None)
@example([5, 5, 4, 4, 3, 3, 3], 3, False)  # longest first gives 5 3 3 and 5 3 and 4 4: 11, and 9 is possible
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3), st.booleans())
def test_the_bound_is_below_the_best_of_all_deals_which_is_found_on_two_ranks(lengths, ranks, equal_counts):
    best = min(
        max(found)
        for owners in itertools.product(range(ranks), repeat=len(lengths))
        for shares in [[[d for d, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]]
        for found in [tokens(lengths, shares)]
        if not equal_counts or max(map(len, shares)) - min(map(len, shares)) <= 1
    )
    busiest = max(tokens(lengths, dealt(lengths, ranks, equal_counts)))
    assert least_tokens(lengths, ranks, equal_counts) <= best <= busiest
    goal = max(least_tokens(lengths, ranks, equal_counts), int(1.01 * sum(lengths) / ranks))
    assert ranks > 2 or busiest == best or busiest <= goal


def test_differences_by_hand():
    """8 7 6 5 4 on three ranks, differences after the bar. 8 0 0 | 8 and 7 0 0 | 7 become 8 7 0 | 8, which becomes
    8 7 6 | 2 with 6 0 0 | 6. 5 0 0 | 5 and 4 0 0 | 4 become 5 4 0 | 5, and that with 8 7 6 | 2: 5 + 6, 4 + 7, 0 + 8.
    Equal counts begin with 8 7 6 | 2 and 5 4 0 | 5, and end alike. On four ranks 8 7 6 5 | 3 meets 4 0 0 0 | 4: 4 + 5,
    6, 7, 8."""
    lengths = [4, 5, 6, 7, 8]
    for equal_counts in (False, True):
        shares = dealing._differenced(lengths, range(5), 3, equal_counts)
        assert sorted(sorted(share) for share in shares) == [[0, 3], [1, 2], [4]]
        assert tokens(lengths, dealt(lengths, 4, equal_counts)) == [9, 8, 7, 6]


def test_the_bound_by_hand():
    assert least_tokens([7, 7, 7, 7], 3) == 14  # two meet
    assert least_tokens([90, 5, 5], 3) == 90  # the longest
    assert least_tokens([10, 10, 10, 9], 2) == 20  # 39 / 2, rounded up
    assert least_tokens([90, 30, 20, 10], 2) == 90 and least_tokens([90, 30, 20, 10], 2, equal_counts=True) == 100
    assert least_tokens([], 4) == least_tokens([], 4, equal_counts=True) == 0


DRAWS = {
    "uniform": lambda rng: rng.randint(64, 512),
    "as GSM8K": lambda rng: min(512, max(40, round(rng.lognormvariate(5.2, 0.35)))),
    "wide": lambda rng: min(2048, max(1, round(rng.lognormvariate(5.2, 0.9)))),
}


@pytest.mark.parametrize("name", DRAWS)
def test_of_1000_random_sets_the_busiest_of_8_ranks_is_2_percent_over_the_mean_or_at_the_bound(name):
    """24 to 256 documents. Of "wide" lengths 57 sets have a document that alone is too long: no deal is better."""
    rng = random.Random(2)
    at_the_bound = 0
    for _ in range(1000):
        lengths = [DRAWS[name](rng) for _ in range(rng.randint(24, 256))]
        busiest, mean = max(tokens(lengths, dealt(lengths, 8))), sum(lengths) / 8
        assert busiest <= max(1.02 * mean, least_tokens(lengths, 8)), lengths
        at_the_bound += busiest > 1.02 * mean
    assert at_the_bound == (57 if name == "wide" else 0)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_three_documents_a_rank(equal_counts):
    """24 sequences on 8 ranks: by differences alone 42 of these 50 are more than 2 % over the mean, and 37 in equal
    counts. Three for each rank cannot always do it: of the 6 left 20,000 trials, not 24, bring two below."""
    rng = random.Random(0)
    sets = [[DRAWS["uniform"](rng) for _ in range(24)] for _ in range(50)]
    over = [max(tokens(lengths, dealt(lengths, 8, equal_counts))) / sum(lengths) * 8 - 1.0 for lengths in sets]
    assert sum(share > 0.02 for share in over) <= (6 if equal_counts else 0)
    alone = [max(tokens(one, dealing._differenced(one, range(24), 8, equal_counts))) / sum(one) * 8 - 1 for one in sets]
    assert sum(share > 0.02 for share in alone) >= 15 and all(map(float.__le__, over, alone))


def test_shares_too_large_for_a_table_swap_documents(monkeypatch):
    rng = random.Random(0)
    lengths = [DRAWS["wide"](rng) for _ in range(160)]
    monkeypatch.setattr(dealing, "_halves", lambda *given: pytest.fail("the table would have been too large"))
    monkeypatch.setattr(dealing, "_MOST_BITS", 0)
    shares = dealt(lengths, 16, equal_counts=True)
    assert {len(share) for share in shares} == {10}
    alone = dealing._differenced(lengths, range(160), 16, True)
    assert max(tokens(lengths, shares)) < max(tokens(lengths, alone))
    assert max(tokens(lengths, shares)) <= max(1.02 * sum(lengths) / 16, least_tokens(lengths, 16, True))
