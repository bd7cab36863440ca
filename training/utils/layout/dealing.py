"""Deals documents to ranks so that the busiest has little more to compute than the mean: number partitioning.

The differencing method of Karmarkar and Karp (1982), for several parts as Korf (1998, section 7) describes it and for
equal counts as Michiels, Korst, Aarts and van Leeuwen (2003), and then a short search, since with three documents a
rank the method alone is up to 14 % over the mean. A document is dealt whole: what must stay together is one document.

Nothing depends on the process or the machine: every rank deals alike. The packages for this (numberpartitioning, prtpy)
have neither equal counts nor a search that ends in a millisecond, and this room needs no package.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

_SPARE = 0.01  # the search ends where the busiest rank is this share over the mean
_TRIALS = 24  # of three ranks dealt anew
_FEW = 16  # documents a rank up to which that is tried: with more there is hardly anything left to gain
_MOST_BITS = 2**26  # about those of the table by which two ranks are split anew; beyond it they swap two documents

Shares = list[list[int]]


def dealt(lengths: Sequence[int], ranks: int, equal_counts: bool = False) -> Shares:
    """Deal the documents 0 .. len(lengths) - 1, of `lengths` tokens, each to one of `ranks` shares of nearly equal
    tokens. Shares come most tokens first, and so do the documents in each.

    equal_counts: shares differ by one document at most.
    """
    lengths = [int(tokens) for tokens in lengths]  # numpy's would overflow in `_halves`
    shares = _differenced(lengths, range(len(lengths)), ranks, equal_counts)
    if ranks > 1:
        goal = max(least_tokens(lengths, ranks, equal_counts), int(sum(lengths) / ranks * (1.0 + _SPARE)))
        shares = _split_anew(lengths, shares, goal, equal_counts)
        if 2 * ranks < len(lengths) <= _FEW * ranks:
            shares = _stirred(lengths, shares, goal, equal_counts)
    shares = [_longest_first(lengths, share) for share in shares]
    return sorted(shares, key=lambda share: (-_tokens(lengths, share), share))


def least_tokens(lengths: Sequence[int], ranks: int, equal_counts: bool = False) -> int:
    """Return a lower bound of the busiest share's tokens, whoever deals: the mean; j + 1 of the j x ranks + 1 longest
    documents, which must meet somewhere; with equal counts, the longest with as many of the shortest as it needs."""
    ordered = sorted(lengths, reverse=True)
    together = (sum(ordered[ranks * j - j : ranks * j + 1]) for j in range(-(-len(ordered) // ranks)))
    least = max(-(-sum(ordered) // ranks), *together, 0)
    if equal_counts and len(ordered) >= ranks:
        least = max(least, ordered[0] + sum(ordered[len(ordered) - len(ordered) // ranks + 1 :]))
    return least


def _tokens(lengths: Sequence[int], share: Iterable[int]) -> int:
    return sum(lengths[document] for document in share)


def _longest_first(lengths: Sequence[int], documents: Iterable[int]) -> list[int]:
    return sorted(documents, key=lambda document: (-lengths[document], document))


def _differenced(lengths: Sequence[int], documents: Iterable[int], ranks: int, equal_counts: bool) -> Shares:
    """Deal by differences. Each document is a deal of its own at first, of one share; with equal counts, each `ranks`
    neighbours in length are. The two deals of the largest differences become one, over and over: the fullest share of
    one with the emptiest of the other, and so on."""
    ordered = _longest_first(lengths, documents)
    # Where every share has room for many of the longest, equal counts lose nothing and take a third of the time.
    all_are_short = bool(ordered) and _tokens(lengths, ordered) >= _FEW * ranks * lengths[ordered[0]]
    size = ranks if equal_counts or all_are_short else 1
    deals = []
    for start in range(0, len(ordered), size):
        alone = [(lengths[document], [document]) for document in ordered[start : start + size]]
        deals.append((_minus_difference(alone, ranks), start, alone))
    heapq.heapify(deals)
    for number in range(len(ordered), len(ordered) + len(deals) - 1):  # breaks ties
        (_, _, one), (_, _, two) = heapq.heappop(deals), heapq.heappop(deals)
        joined = [*one, *two]
        if len(joined) > ranks:
            joined = one + [(0, [])] * (ranks - len(one))
            for place, (tokens, share) in enumerate(two, start=1):
                joined[-place] = (joined[-place][0] + tokens, joined[-place][1] + share)
        joined.sort(key=lambda share: -share[0])
        heapq.heappush(deals, (_minus_difference(joined, ranks), number, joined))
    shares = [share for _, _, deal in deals for _, share in deal]
    return shares + [[] for _ in range(ranks - len(shares))]


def _minus_difference(shares: Sequence[tuple[int, list[int]]], ranks: int) -> int:
    """The least tokens of a share minus the most; shares that are not listed are empty."""
    return (shares[-1][0] if len(shares) == ranks else 0) - shares[0][0]


def _split_anew(lengths: Sequence[int], shares: Shares, goal: int, equal_counts: bool) -> Shares:
    """Split the busiest share and another anew, the emptiest that helps, until the goal is met or none helps."""
    shares = list(shares)
    tokens = [_tokens(lengths, share) for share in shares]
    while max(tokens) > goal:
        *others, busiest = sorted(range(len(shares)), key=lambda rank: (tokens[rank], rank))
        for other in others:
            both = _longest_first(lengths, shares[busiest] + shares[other])
            if len(both) ** (2 if equal_counts else 1) * tokens[busiest] <= _MOST_BITS:
                anew = _halves(lengths, both, equal_counts)
            else:
                anew = _swapped(lengths, shares[other], shares[busiest])
            counted = [_tokens(lengths, share) for share in anew]
            if max(counted) < tokens[busiest]:
                shares[other], shares[busiest] = anew
                tokens[other], tokens[busiest] = counted
                break
        else:
            break
    return shares


def _swapped(lengths: Sequence[int], lighter: list[int], heavier: list[int]) -> tuple[list[int], list[int]]:
    """Swap the two documents of two shares that make them most alike."""
    excess = (_tokens(lengths, heavier) - _tokens(lengths, lighter)) / 2
    mine, theirs = (np.array([lengths[document] for document in share]) for share in (heavier, lighter))
    order = np.argsort(theirs, kind="stable")
    above = np.searchsorted(theirs[order], mine - excess).clip(max=len(theirs) - 1)
    places = np.stack([order[above], order[(above - 1).clip(min=0)]])
    missed = np.abs(mine - theirs[places] - excess)
    side, place = np.unravel_index(missed.argmin(), missed.shape)
    given, got = heavier[place], lighter[places[side, place]]
    return (
        [given if document == got else document for document in lighter],
        [got if document == given else document for document in heavier],
    )


def _halves(lengths: Sequence[int], documents: Sequence[int], equal_counts: bool) -> tuple[list[int], list[int]]:
    """Split documents into two shares as equal as can be, the lighter first.

    Bit t of an integer is set where some of the documents so far have t tokens together: an integer for each number of
    them where counts matter, else one for all.
    """
    half = _tokens(lengths, documents) // 2
    most = (len(documents) + 1) // 2 if equal_counts else 0
    up_to_half, step = (1 << (half + 1)) - 1, int(equal_counts)
    sums = [[1] + [0] * most]
    for document in documents:
        before = sums[-1]
        after = [(before[n] | before[n - step] << lengths[document]) & up_to_half for n in range(step, most + 1)]
        sums.append(before[:step] + after)
    count = max(range(len(documents) // 2 if equal_counts else 0, most + 1), key=lambda n: sums[-1][n])
    left = sums[-1][count].bit_length() - 1
    lighter, heavier = [], []
    for place in reversed(range(len(documents))):
        document = documents[place]
        if sums[place][count] >> left & 1:  # the sum is reached without it
            heavier.append(document)
        else:
            lighter.append(document)
            left, count = left - lengths[document], count - step
    return lighter, heavier


def _stirred(lengths: Sequence[int], shares: Shares, goal: int, equal_counts: bool) -> Shares:
    """Mix the documents of the busiest rank and two others, deal them anew and keep what is no worse, some times."""
    generator = np.random.Generator(np.random.PCG64(0))
    for _ in range(_TRIALS):
        *others, busiest = sorted(range(len(shares)), key=lambda rank: (_tokens(lengths, shares[rank]), rank))
        most = _tokens(lengths, shares[busiest])
        if most <= goal or len(others) < 2:
            break
        three = [busiest, *(others[place] for place in generator.permutation(len(others))[:2].tolist())]
        mixed = [document for rank in three for document in shares[rank]]
        mixed = [mixed[place] for place in generator.permutation(len(mixed)).tolist()]
        anew = _split_anew(lengths, [mixed[part::3] for part in range(3)], goal, equal_counts)
        if max(_tokens(lengths, share) for share in anew) <= most:
            for rank, share in zip(three, anew, strict=True):
                shares[rank] = share
            shares = _split_anew(lengths, shares, goal, equal_counts)
    return shares
