"""Ranks share sequences; the responses to one prompt share it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from training.utils.contracts.documents import TokenSequence, join
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout import trie as laid_out
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import NEVER, SequenceLayout, documents_of, prompt_groups, rank_share

CPU, PAD = torch.device("cpu"), 2
PROMPT_TOKENS, RESPONSE_TOKENS = [4, 2, 7, 1, 3], [3, 1, 5, 6, 2]
SEQUENCES = [
    join(torch.arange(prompt) + 10 * index, torch.arange(response) + 50)
    for index, (prompt, response) in enumerate(zip(PROMPT_TOKENS, RESPONSE_TOKENS, strict=True))
]


def test_samples_of_a_prompt_are_groups_of_bounded_length():
    prompts = [torch.arange(4), torch.arange(7), torch.arange(4), torch.arange(4), torch.arange(7)]
    responses = zip(prompts, RESPONSE_TOKENS, strict=True)
    samples = [join(prompt, torch.arange(tokens) + 50) for prompt, tokens in responses]
    assert prompt_groups(samples, NEVER, 100) == [[0, 2, 3], [1, 4]]
    # In 17 tokens a prompt of 4 has room for responses of 3 and 5 tokens, not for 6 more.
    assert prompt_groups(samples, NEVER, 17) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("plan", [PlanSettings(3, max_rows_per_micro_batch=1), PlanSettings(3, 13, 8, True, 13)])
def test_ranks_share_all_sequences_in_as_many_micro_batches(plan):
    """Two sequences for three ranks: one of them goes along with rows that carry nothing."""
    shares = [rank_share(SEQUENCES, SequenceLayout(plan, PAD, rank), CPU) for rank in range(3)]
    assert len({len(laid) for laid in shares}) == 1
    assert sorted(index for laid in shares for indices, _ in laid for index in indices) == [0, 1, 2, 3, 4]
    few = [rank_share(SEQUENCES[:2], SequenceLayout(plan, PAD, rank), CPU) for rank in range(3)]
    assert [len(laid) for laid in few] == [1, 1, 1] and sorted(len(laid[0][0]) for laid in few) == [0, 1, 1]
    for indices, rows in (part for laid in shares for part in laid):
        assert rows.target_ids_M.numel() == sum(RESPONSE_TOKENS[index] for index in indices)


def test_the_parts_of_a_sequence_that_forks_stay_together():
    """Padded, each is a row of one micro-batch, which holds as many rows as it may, or one sequence alone; packed, they
    share a row. To a loss they are one sequence."""
    long = join(torch.arange(4), torch.arange(8) + 50)
    forks = replace(long, is_target=torch.arange(12) % 4 > 1, forks=(4, 8))
    sequences = [forks, SEQUENCES[0], forks, SEQUENCES[1], replace(forks, forks=(8,)), SEQUENCES[4]]
    heights = [3, 1, 3, 1, 2, 1]
    for plan in (PlanSettings(1, None, 4), PlanSettings(1, 20, None), PlanSettings(2, None, 2)):
        seen = [
            part for rank in range(plan.ranks) for part in rank_share(sequences, SequenceLayout(plan, PAD, rank), CPU)
        ]
        assert sorted(index for indices, _ in seen for index in indices) == list(range(6))
        for indices, rows in seen:
            count, width = rows.input_ids_NT.shape
            assert count == max(1, sum(heights[index] for index in indices)) and rows.segments is None
            if len(indices) > 1:
                assert count <= (plan.max_rows_per_micro_batch or 99)
                assert count * width <= (plan.max_tokens_per_micro_batch or 999)
            check_whole(indices, rows, sequences)
    for plan in (PlanSettings(1, 50, 8, True, 50), PlanSettings(2, 50, 8, True, 50, least_shared_tokens=1)):
        for rank in range(plan.ranks):
            for indices, rows in rank_share(sequences, SequenceLayout(plan, PAD, rank), CPU):
                assert len(rows.input_ids_NT) <= 2
                check_whole(indices, rows, sequences)


def check_whole(indices: list[int], rows: TokenRows, sequences: list[TokenSequence]) -> None:
    for place, index in enumerate(indices):
        own, ids_L = rows.sequence_M == place, rows.input_ids_NT.flatten()
        assert torch.equal(rows.target_ids_M[own], sequences[index].input_ids[sequences[index].is_target])
        assert ids_L[rows.end_B[place]] == sequences[index].input_ids[-1]
    assert len(rows.end_B) == len(indices)


def test_a_rank_makes_its_own_documents_alone(monkeypatch):
    """Of the others' it counts the tokens, without making them."""
    samples = [join(torch.arange(prompt), torch.arange(3) + 50) for prompt in (4, 4, 7, 2, 2, 2)]
    plan = PlanSettings(3, 13, 8, True, 13)
    documents = documents_of(samples, plan)
    groups = prompt_groups(samples, NEVER, plan.max_row_tokens)
    assert [len(group) for group in groups] == [2, 1, 3]
    counted = [laid_out.trie_size([samples[index] for index in group], NEVER).tokens for group in groups]
    assert counted == [document.tokens for document in documents]
    made = []
    one = laid_out._document
    monkeypatch.setattr(
        laid_out, "_document", lambda sequences, plan: made.append(len(sequences)) or one(sequences, plan)
    )
    for rank in range(3):
        rank_share(samples, SequenceLayout(plan, PAD, rank), CPU)
    assert sorted(made) == [1, 2, 3]
