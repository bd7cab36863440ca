"""Sequences and values that travel come back as they were; each rank gets what belongs to its own sequences."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from training.step3_ppo.experience import sequences as exchange
from training.step3_ppo.experience.sequences import (
    packed_sequences,
    packed_values,
    read_balanced,
    unpacked_sequences,
    unpacked_values,
)
from training.utils.contracts.documents import MediaSpan, TokenSequence

CPU = torch.device("cpu")


def sequence(*ids: int) -> TokenSequence:
    """All but the first token are targets."""
    is_target = torch.ones(len(ids), dtype=torch.bool)
    is_target[0] = False
    return TokenSequence(torch.tensor(ids), is_target)


def test_experts_come_back_beside_the_tokens():
    given = [
        replace(sequence(5, 6, 7), experts=torch.arange(12, dtype=torch.int16).view(3, 2, 2)),
        replace(sequence(8), experts=torch.full((1, 2, 2), -1, dtype=torch.int16)),
    ]
    for before, after in zip(given, unpacked_sequences(packed_sequences(given)), strict=True):
        assert after.experts.dtype == torch.int16 and torch.equal(after.experts, before.experts)
        assert torch.equal(after.input_ids, before.input_ids)


def test_what_is_packed_comes_back():
    sequences = [sequence(1, 2, 3), sequence(4), sequence(5, 6)]
    back = unpacked_sequences(packed_sequences(sequences))
    for one, two in zip(sequences, back, strict=True):
        assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.is_target, two.is_target)
    values = [torch.tensor([0.5, 1.5]), torch.tensor([]), torch.tensor([2.5])]
    assert [part.tolist() for part in unpacked_values(packed_values(values), CPU)] == [[0.5, 1.5], [], [2.5]]
    spans = (MediaSpan(1, 2, (1, 2), key=7), MediaSpan(3, 1, key=300, sees_itself=True))
    pictured = [sequence(1, 2, 3, 4), replace(sequence(5, 6, 7, 8), media=spans), sequence(9)]
    assert [each.media for each in unpacked_sequences(packed_sequences(pictured))] == [(), spans, ()]
    parts = [sequence(1, 2, 3, 4), replace(sequence(5, 6, 7, 8), forks=(2, 3)), sequence(9)]
    assert [each.forks for each in unpacked_sequences(packed_sequences(parts))] == [(), (2, 3), ()]
    assert unpacked_sequences(packed_sequences([])) == [] and unpacked_values(packed_values([]), CPU) == []


class Ranks:
    """`gathered` for threads that stand for ranks."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier, self.items = count, threading.Barrier(count, timeout=30), [None] * count
        self.own = threading.local()

    def gathered(self, item):
        self.items[self.own.rank] = item
        self.barrier.wait()
        everyone = list(self.items)
        self.barrier.wait()
        return everyone


def test_a_rank_without_sequences_or_without_a_share_takes_part(monkeypatch):
    """Rank 1 has no sequence of its own and rank 0 computes nothing: both call what is collective."""
    ranks, answers = Ranks(2), {}
    monkeypatch.setattr(exchange, "gathered", ranks.gathered)
    monkeypatch.setattr(exchange, "rank_share", lambda everyone, layout, device: layout.share(everyone, device))
    monkeypatch.setattr(exchange, "several_ranks", lambda: True)
    own = {0: [sequence(1, 2, 3), sequence(4, 5)], 1: []}

    def work(rank: int) -> None:
        ranks.own.rank = rank

        def share(everyone, device):
            return [
                ([], SimpleNamespace(ids=[])),
                ([0, 1] if rank else [], SimpleNamespace(ids=everyone if rank else [])),
            ]

        def reads(share):
            return [read(rows) for _, rows in share]

        def read(rows):
            return {"value": torch.cat([torch.empty(0), *(each.input_ids[1:] * 10.0 for each in rows.ids)])}

        settings = SimpleNamespace(rank=rank, share=share)
        found = read_balanced(own[rank], settings, reads, count=lambda each: len(each) - 1, device=CPU)
        answers[rank] = found["value"].tolist()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: [20.0, 30.0, 50.0], 1: []}


@pytest.mark.parametrize("several", [False, True])
def test_each_rank_gets_the_values_of_its_own_sequences(monkeypatch, several):
    """Rank 0 has three sequences and rank 1 one; rank 1 computes the second half of all, the last of them first."""
    own = {0: [sequence(1, 2, 3), sequence(4, 5), sequence(6, 7, 8, 9)], 1: [sequence(10, 11)]}
    if not several:
        own = {0: own[0] + own[1]}
    ranks, answers = Ranks(len(own)), {}
    monkeypatch.setattr(exchange, "gathered", ranks.gathered)
    monkeypatch.setattr(exchange, "rank_share", lambda everyone, layout, device: layout.share(everyone, device))
    monkeypatch.setattr(exchange, "several_ranks", lambda: several)

    def work(rank: int) -> None:
        ranks.own.rank = rank

        def share(everyone, device):
            assert [each.input_ids[0] for each in everyone] == [1, 4, 6, 10]
            mine = {0: [0, 1], 1: [3, 2]}[rank] if several else [2, 0, 3, 1]
            rows = SimpleNamespace(ids=[everyone[index].input_ids[everyone[index].is_target] for index in mine])
            return [(mine, rows), ([], SimpleNamespace(ids=[]))]

        def reads(share):
            return [read(rows) for _, rows in share]

        def read(rows):
            ids = torch.cat([torch.empty(0), *rows.ids])
            return {"value": torch.cat([ids * 10, torch.tensor([-1.0])])}  # what comes behind belongs to none

        settings = SimpleNamespace(rank=rank, share=share)
        found = read_balanced(own[rank], settings, reads, count=lambda each: len(each) - 1, device=CPU)
        answers[rank] = found["value"].tolist()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [20.0, 30.0, 50.0, 70.0, 80.0, 90.0]
    assert answers == ({0: wanted, 1: [110.0]} if several else {0: [*wanted, 110.0]})
