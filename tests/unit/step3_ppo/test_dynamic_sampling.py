"""Groups that all score the same are replaced, within bounds and in step with other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from training.step3_ppo.dynamic_sampling import equal_groups, with_differing_groups
from training.step3_ppo.records import Samples, Scored
from training.utils.data.rows.phases import PromptRow
from training.utils.generation.records import Rollout
from training.utils.layout.images import ImageSpan

PAD = 9
SETTINGS: Any = SimpleNamespace(samples_per_prompt=2, pad_token_id=PAD)


def samples(
    outcomes: list[list[float]],
    first: int,
    prompt_width: int,
    width: int,
    in_parallel: bool = False,
    with_images: bool = False,
) -> Samples:
    """Two samples a prompt; prompts and responses are numbered from `first`, so that each can be told again."""
    count = 2 * len(outcomes)
    numbers_B = torch.arange(count) + 2 * first
    lengths_B = numbers_B % width + 1
    inside_BR = torch.arange(width) < lengths_B[:, None]
    rollout = Rollout(
        prompt_ids_BP=(numbers_B // 2)[:, None].expand(count, prompt_width).clone(),
        prompt_mask_BP=torch.ones(count, prompt_width, dtype=torch.bool),
        response_ids_BR=torch.where(inside_BR, 100 + numbers_B[:, None], PAD),
        response_lengths_B=lengths_B,
        sampled_logprobs_BR=torch.where(inside_BR, -numbers_B[:, None].float(), 0.0),
        ended_B=numbers_B % 2 == 0,
        inserted_BR=inside_BR & (numbers_B % 3 == 0)[:, None] if in_parallel else None,
        positions_B=numbers_B if in_parallel else None,
        images=tuple((ImageSpan(0, 1, key=int(number)),) for number in numbers_B // 2) if with_images else None,
    )
    rows = tuple(PromptRow(first + g, np.array([first + g]), f"prompt {first + g}", None) for g in range(len(outcomes)))
    flat_B = torch.tensor(outcomes).flatten().float()
    # Each batch has a value of its own beside the one that all have.
    scored = Scored(flat_B + 10, flat_B, {"rule": flat_B + 20, f"rule/{first}": flat_B})
    return Samples(rows, rollout, lambda: scored)


def test_equal_groups():
    assert equal_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0]), 2).tolist() == [True, False, True]


def check(found: Samples, prompts: list[int]) -> None:
    """Every field of every sequence belongs to its prompt."""
    assert [row.row_id for row in found.rows] == prompts
    rollout = found.rollout
    assert rollout.prompt_mask_BP[:, -1].all()  # padded on the left
    for index in range(2 * len(prompts)):
        number = 2 * prompts[index // 2] + index % 2
        assert set(rollout.prompt_of(index).tolist()) == {prompts[index // 2]}
        assert set(rollout.response_of(index).tolist()) == {100 + number}
        assert rollout.ended_B[index] == (number % 2 == 0)
        length = int(rollout.response_lengths_B[index])
        assert rollout.sampled_logprobs_BR[index, :length].tolist() == [-number] * length
        assert (rollout.response_ids_BR[index, length:] == PAD).all()
    scored = found.scored
    assert torch.equal(scored.scores_B, scored.outcomes_B + 10)
    assert torch.equal(scored.parts["rule"], scored.outcomes_B + 20)


def test_replacements_take_the_places_of_equal_groups():
    first = samples([[1, 1], [0, 1], [0, 0]], first=0, prompt_width=2, width=3)
    asked = []

    def draw(attempt: int, count: int) -> Samples:
        asked.append((attempt, count))
        outcomes = [[5, 5], [0, 5]] if attempt == 0 else [[3, 4]]
        return samples(outcomes, first=10 + 10 * attempt, prompt_width=4, width=5)

    found = with_differing_groups(first, draw, tries=5, settings=SETTINGS)
    assert asked == [(0, 2), (1, 1)]  # and no further, since nothing is equal any more
    check(found, [11, 1, 20])
    assert found.scored.outcomes_B.tolist() == [0, 5, 0, 1, 3, 4]
    parts = found.scored.parts
    assert parts["rule/0"].nan_to_num(-1).tolist() == [-1, -1, 0, 1, -1, -1]
    assert parts["rule/10"].nan_to_num(-1).tolist() == [0, 5, -1, -1, -1, -1]


def test_what_was_drawn_in_parallel_keeps_its_inserted_tokens():
    first = samples([[1, 1], [0, 1]], first=0, prompt_width=2, width=3, in_parallel=True)
    fresh = samples([[0, 5]], first=10, prompt_width=4, width=5, in_parallel=True)
    found = with_differing_groups(first, lambda attempt, count: fresh, tries=1, settings=SETTINGS)
    check(found, [10, 1])
    rollout = found.rollout
    assert rollout.positions_B is not None and rollout.inserted_BR is not None
    assert rollout.positions_B.tolist() == [20, 21, 2, 3]
    whole_B = torch.tensor([number % 3 == 0 for number in (20, 21, 2, 3)])
    assert torch.equal(rollout.inserted_BR, rollout.response_mask_BR & whole_B[:, None])


def test_after_the_last_try_what_is_left_stays():
    first = samples([[1, 1], [0, 0]], first=0, prompt_width=2, width=3)
    calls = []

    def draw(attempt: int, count: int) -> Samples:
        calls.append(count)
        return samples([[7, 7]] * count, first=10, prompt_width=1, width=1)

    found = with_differing_groups(first, draw, tries=3, settings=SETTINGS)
    assert calls == [2, 2, 2]
    check(found, [0, 1])


def test_a_rank_without_equal_groups_goes_along(monkeypatch):
    """Another rank lacks two prompts: this one draws two as well, and drops them."""
    monkeypatch.setattr("training.step3_ppo.dynamic_sampling.largest", lambda number, _device: 2 if not calls else 0)
    calls = []

    def draw(attempt: int, count: int) -> Samples:
        calls.append(count)
        return samples([[1, 2]] * count, first=10, prompt_width=3, width=4)

    first = samples([[1, 2], [3, 4]], first=0, prompt_width=2, width=3)
    check(with_differing_groups(first, draw, tries=4, settings=SETTINGS), [0, 1])
    assert calls == [2]


def test_images_go_with_their_prompts():
    """Also where only the replacements have some."""
    for with_images in (True, False):
        first = samples([[1, 1], [0, 1]], first=0, prompt_width=2, width=3, with_images=with_images)
        fresh = samples([[0, 5]], first=10, prompt_width=2, width=3, with_images=True)
        found = with_differing_groups(first, lambda attempt, count, own=fresh: own, tries=1, settings=SETTINGS)
        check(found, [10, 1])
        keys = [[image.key for image in own] for own in found.rollout.images or ()]
        assert keys == [[10], [10], [1], [1]] if with_images else keys == [[10], [10], [], []]
