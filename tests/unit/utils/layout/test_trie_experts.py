"""Beginnings are shared where tokens and their experts are equal."""

from __future__ import annotations

import torch

from training.utils.contracts.documents import TokenSequence, first_alike, together
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import SequenceLayout, prompt_groups, rank_share, trie_document

PROMPT, RESPONSE = 4, 5


def sampled(first_expert: int, at: int | None = None, ids=(5, 6, 7, 8, 9)) -> TokenSequence:
    """A prompt with a response; its token number `at` is computed by other experts."""
    tokens = torch.tensor([1, 2, 3, 4, *ids])
    experts = torch.arange(len(tokens) * 4, dtype=torch.int16).view(-1, 2, 2) + first_expert
    if at is not None:
        experts[at, 1, 0] += 1
    return TokenSequence(tokens, torch.arange(len(tokens)) >= PROMPT, experts=experts)


def test_tokens_of_other_experts_stand_by_themselves():
    one, same, other = sampled(0), sampled(0), sampled(0, at=6)
    alike = trie_document([one, same], least_tokens=1)
    assert sum(len(segment.tokens) for segment in alike.segments) == PROMPT + RESPONSE
    apart = trie_document([one, other], least_tokens=1)
    assert [len(segment.tokens) for segment in apart.segments] == [6, 3, 3]
    for document, sequences in ((alike, [one, same]), (apart, [one, other])):
        for number, sequence in enumerate(sequences):
            held = together([document.segments[index].tokens for index in document.held_by(number)])
            assert torch.equal(held.input_ids, sequence.input_ids) and torch.equal(held.experts, sequence.experts)


def test_prompts_of_other_experts_are_no_group():
    sequences = [sampled(0), sampled(0, at=8), sampled(0, at=1), sampled(0)]
    assert prompt_groups(sequences, 1, 100) == [[0, 1, 3], [2]]
    assert first_alike(sequences) == [0, 1, 2, 0]


def test_rows_have_the_experts_of_their_tokens():
    plan = PlanSettings(1, 40, 8, packed=True, max_row_tokens=40, least_shared_tokens=1)
    sequences = [sampled(0), sampled(0, at=6), sampled(3)]
    (share,) = rank_share(sequences, SequenceLayout(plan, 0), torch.device("cpu"))
    rows = share.rows
    ids, experts = rows.input_ids_NT.flatten(), rows.experts_NTLK.flatten(0, 1)
    assert experts.dtype == torch.int16 and bool((experts[rows.segment_ids_NT.flatten() == -1] == -1).all())
    read = {(int(token), int(own[0, 0])) for token, own in zip(ids, experts, strict=True) if token}
    expected = {(int(t), int(e[0, 0])) for each in sequences for t, e in zip(each.input_ids, each.experts, strict=True)}
    assert read == expected
    assert packed_rows([], 0).experts_NTLK is None


def test_texts_between_rollouts_are_free():
    free = TokenSequence(torch.tensor([1, 2]), torch.tensor([False, True]))
    rows = packed_rows([[trie_document([free], 1), trie_document([sampled(0)], 1)]], 0)
    assert rows.experts_NTLK.shape == (1, 11, 2, 2) and bool((rows.experts_NTLK[0, :2] == -1).all())
    assert torch.equal(rows.experts_NTLK[0, 2:], sampled(0).experts)
    assert rows.of_free_experts().experts_NTLK is None
