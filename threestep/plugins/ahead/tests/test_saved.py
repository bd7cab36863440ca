"""Rollouts come back from JSON bit by bit, conversations and paths with them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from threestep.plugins.ahead.saved import rollouts_of, saved_rollouts
from threestep.plugins.replay.rollout_tensors import tensors_of
from training.utils.contracts.rollout import ConversationRecord, Conversations, DrawnExperts, FormedResponses, Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.engine.ranks.startup import Ranks

SAMPLING = Sampling(max_new_tokens=4, temperature=1.0, top_k=0, top_p=1.0, end_token_id=9, pad_token_id=0)


def rollout(kind: str, prompts: list[int], longest: int = 3) -> Rollout:
    """Two samples of each prompt, whose tokens tell the prompt and the sample."""
    count, dice = 2 * len(prompts), torch.Generator().manual_seed(len(prompts))
    lengths_B = torch.tensor([1 + row % longest for row in range(count)])
    inside_BR = torch.arange(longest) < lengths_B.unsqueeze(1)
    ids_BR = torch.tensor([[10 * prompts[row // 2] + row % 2] * longest for row in range(count)]) * inside_BR
    logprobs_BR = torch.randn(count, longest, generator=dice) * inside_BR
    ids_BP = torch.tensor([[prompt] for prompt in prompts]).repeat_interleave(2, dim=0)
    ended_B = torch.tensor([row % 3 == 0 for row in range(count)])
    made = Rollout(ids_BP, ids_BP > 0, ids_BR, lengths_B, logprobs_BR, ended_B, seconds=0.25)
    nothing_BR = torch.zeros_like(inside_BR)
    if kind == "paths":
        made = Rollout(*made_columns(made), inserted=FormedResponses(nothing_BR, lengths_B), seconds=0.25)
    if kind == "turns":
        records = tuple(
            ConversationRecord(1 + row, "turns" if row else None, {"calls": 0.1 * row}) for row in range(count)
        )
        turns = Conversations(records, nothing_BR, nothing_BR.clone(), logprobs_BR.abs())
        made = Rollout(*made_columns(made), inserted=turns, seconds=0.25)
    if kind == "experts":
        of_prompt, of_response = (
            torch.randint(0, 8, (*ids.shape, 3, 2), generator=dice).short() for ids in (ids_BP, ids_BR)
        )
        made = Rollout(*made_columns(made), seconds=0.25, experts=DrawnExperts(of_prompt, of_response))
    return made


def made_columns(made: Rollout) -> tuple[torch.Tensor, ...]:
    return (
        made.prompt_ids_BP, made.prompt_mask_BP, made.response_ids_BR, made.response_lengths_B,
        made.sampled_logprobs_BR, made.ended_B,
    )  # fmt: skip


def ranks(world_size: int, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["plain", "paths", "turns", "experts"])
def test_every_bit_comes_back(kind):
    before = rollout(kind, [3, 5, 7])
    saved = json.loads(json.dumps(saved_rollouts([before])))
    (after,) = rollouts_of([saved], [SimpleNamespace()], ranks(1))
    (one, records), (other, same) = tensors_of(before), tensors_of(after)
    assert records == same and (records is None) == (kind != "turns") and after.seconds == 0.25
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["plain", "turns", "experts"])
def test_prompts_are_dealt_anew_to_other_ranks(kind):
    """Prompts 1, 2, 3, 4 of two ranks, whose responses have other widths: one rank has them in order, four one each."""
    saved = [saved_rollouts([rollout(kind, [1, 3])]), saved_rollouts([rollout(kind, [2, 4], longest=2)])]
    for world_size, own in ((1, [[1, 2, 3, 4]]), (4, [[1], [2], [3], [4]])):
        for rank, prompts in enumerate(own):
            request = RolloutRequest(torch.zeros(len(prompts), 1), torch.ones(len(prompts), 1), SAMPLING, (), 2)
            (found,) = rollouts_of(saved, [request], ranks(world_size, rank))
            assert found.prompt_ids_BP.flatten().tolist() == [prompt for prompt in prompts for _ in range(2)]
            firsts = found.response_ids_BR[:, 0].tolist()
            assert firsts == [10 * prompt + sample for prompt in prompts for sample in range(2)]
            assert len(found.records) == (2 * len(prompts) if kind == "turns" else 0)
