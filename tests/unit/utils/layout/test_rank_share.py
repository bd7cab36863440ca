"""Ranks share sequences; the responses to one prompt share it."""

from __future__ import annotations

import pytest
import torch

from training.utils.layout import rank_share as laid_out
from training.utils.layout.documents import join
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rank_share import documents_of, rank_share, shared_groups

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
    assert shared_groups(samples, 100) == [[0, 2, 3], [1, 4]]
    # In 17 tokens a prompt of 4 has room for responses of 3 and 5 tokens, not for 6 more.
    assert shared_groups(samples, 17) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("plan", [PlanSettings(3, max_rows_per_micro_batch=1), PlanSettings(3, 13, 8, True, 13)])
def test_ranks_share_all_sequences_in_as_many_micro_batches(plan):
    """Two sequences for three ranks: one of them goes along with rows that carry nothing."""
    shares = [rank_share(SEQUENCES, plan, PAD, rank, CPU) for rank in range(3)]
    assert len({len(laid) for laid in shares}) == 1
    assert sorted(index for laid in shares for indices, _ in laid for index in indices) == [0, 1, 2, 3, 4]
    few = [rank_share(SEQUENCES[:2], plan, PAD, rank, CPU) for rank in range(3)]
    assert [len(laid) for laid in few] == [1, 1, 1] and sorted(len(laid[0][0]) for laid in few) == [0, 1, 1]
    for indices, rows in (part for laid in shares for part in laid):
        assert rows.target_ids_M.numel() == sum(RESPONSE_TOKENS[index] for index in indices)


def test_a_rank_makes_its_own_documents_alone(monkeypatch):
    """Of the others' it counts the tokens, without making them."""
    samples = [join(torch.arange(prompt), torch.arange(3) + 50) for prompt in (4, 4, 7, 2, 2, 2)]
    plan = PlanSettings(3, 13, 8, True, 13)
    documents = documents_of(samples, plan)
    groups = shared_groups(samples, plan.max_row_tokens)
    assert [len(group) for group in groups] == [2, 1, 3]
    counted = [laid_out._tokens([samples[index] for index in group]) for group in groups]
    assert counted == [document.tokens for document in documents]
    made = []
    one = laid_out._document
    monkeypatch.setattr(laid_out, "_document", lambda sequences: made.append(len(sequences)) or one(sequences))
    for rank in range(3):
        rank_share(samples, plan, PAD, rank, CPU)
    assert sorted(made) == [1, 2, 3]
