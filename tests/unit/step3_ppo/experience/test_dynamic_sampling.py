"""Groups that all score the same are replaced, within bounds, and by the same ones on any number of ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.thread_ranks import ThreadRanks
from training.step3_ppo.contracts.records import Samples, Scored
from training.step3_ppo.experience import dynamic_sampling
from training.step3_ppo.experience.dynamic_sampling import DrawnGroups, GroupCounts, equal_groups, with_differing_groups
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.rollout import FormedResponses, Rollout
from training.utils.contracts.rows import PromptRow

PAD = 9


def settings_of(rank: int = 0, ranks: int = 1) -> Any:
    layout = SimpleNamespace(pad_token_id=PAD, rank=rank, plan=SimpleNamespace(ranks=ranks))
    return SimpleNamespace(samples_per_prompt=2, layout=layout)


SETTINGS = settings_of()


def samples(
    outcomes: list[list[float]], first: int, prompt_width: int = 2, width: int = 3, is_formed: bool = False,
    has_images: bool = False,
) -> Samples:  # fmt: skip
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
        inserted=FormedResponses(inside_BR & (numbers_B % 3 == 0)[:, None], numbers_B) if is_formed else None,
        media=tuple((MediaSpan(0, 1, key=int(number)),) for number in numbers_B // 2) if has_images else None,
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
    rollout, scored = found.rollout, found.scored
    assert rollout.prompt_mask_BP[:, -1].all()  # padded on the left
    for index in range(2 * len(prompts)):
        number = 2 * prompts[index // 2] + index % 2
        assert set(rollout.prompt_of(index).tolist()) == {prompts[index // 2]}
        assert set(rollout.response_of(index).tolist()) == {100 + number}
        assert rollout.ended_B[index] == (number % 2 == 0)
        length = int(rollout.response_lengths_B[index])
        assert rollout.sampled_logprobs_BR[index, :length].tolist() == [-number] * length
        assert (rollout.response_ids_BR[index, length:] == PAD).all()
    assert torch.equal(scored.scores_B, scored.outcomes_B + 10)
    assert torch.equal(scored.parts["rule"], scored.outcomes_B + 20)


def test_replacements_take_the_places_of_equal_groups():
    first = samples([[1, 1], [0, 1], [0, 0]], first=0)
    asked = []

    def draw(attempt: int, count: int) -> Samples:
        asked.append((attempt, count))
        outcomes = [[5, 5], [0, 5]] if attempt == 0 else [[3, 4]]
        return samples(outcomes, first=10 + 10 * attempt, prompt_width=4, width=5)

    drawn = with_differing_groups(first, draw, tries=5, settings=SETTINGS)
    assert asked == [(0, 2), (1, 1)]  # and no further, since nothing is equal any more
    assert drawn.counts == GroupCounts(replaced=2, kept_equal=0, dropped=1)
    found = drawn.samples
    check(found, [11, 1, 20])
    assert found.scored.outcomes_B.tolist() == [0, 5, 0, 1, 3, 4]
    parts = found.scored.parts
    assert parts["rule/0"].nan_to_num(-1).tolist() == [-1, -1, 0, 1, -1, -1]
    assert parts["rule/10"].nan_to_num(-1).tolist() == [0, 5, -1, -1, -1, -1]


@pytest.mark.parametrize("first_too", [True, False])
def test_forms_and_images_go_with_their_prompts(first_too):
    """Also where only the replacements have images."""
    first = samples([[1, 1], [0, 1]], 0, is_formed=True, has_images=first_too)
    fresh = samples([[0, 5]], 10, 4, 5, is_formed=True, has_images=True)
    found = with_differing_groups(first, lambda attempt, count: fresh, tries=1, settings=SETTINGS).samples
    check(found, [10, 1])
    rollout = found.rollout
    assert [[image.key for image in own] for own in rollout.media] == [
        [10],
        [10],
        *([[1], [1]] if first_too else [[], []]),
    ]
    assert rollout.formed.positions_B.tolist() == [20, 21, 2, 3]
    whole_B = torch.tensor([number % 3 == 0 for number in (20, 21, 2, 3)])
    assert torch.equal(rollout.inserted_BR, rollout.response_mask_BR & whole_B[:, None])


def test_after_the_last_try_what_is_left_stays():
    first = samples([[1, 1], [0, 0]], first=0)
    calls = []

    def draw(attempt: int, count: int) -> Samples:
        calls.append(count)
        return samples([[7, 7]] * count, first=10, prompt_width=1, width=1)

    drawn = with_differing_groups(first, draw, tries=3, settings=SETTINGS)
    assert calls == [2, 2, 2]
    check(drawn.samples, [0, 1])
    assert drawn.counts == GroupCounts(replaced=0, kept_equal=2, dropped=6)
    assert drawn.counts.figures() == {
        "dynamic_sampling/replaced": 0.0, "dynamic_sampling/kept_equal": 2.0, "dynamic_sampling/dropped": 6.0,
    }  # fmt: skip


# --- any number of ranks


PLACES = 12  # in a batch of all ranks


def group_at(seed: int, attempt: int, place: int) -> tuple[int, list[float]]:
    """A prompt's number and its outcomes, equal in two of three."""
    dice = random.Random(f"{seed} {attempt} {place}")
    score = dice.choice([0.0, 1.0, 2.5])
    return 100 * (attempt + 1) + place, [score, score + (dice.random() < 1 / 3)]


def drawn_on(monkeypatch, ranks: int, seed: int, tries: int) -> list[DrawnGroups]:
    def draws(rank: int, attempt: int, count: int) -> Samples:
        numbers, outcomes = zip(*(group_at(seed, attempt, rank + ranks * own) for own in range(count)), strict=True)
        # Widths differ by rank, as those of the longest prompts and responses do.
        parts = [samples([each], number, 2 + rank, 4 + attempt + rank) for number, each in zip(numbers, outcomes)]  # noqa: B905
        return dynamic_sampling._picked(parts, range(count), SETTINGS)

    ranks_here = ThreadRanks(ranks)
    monkeypatch.setattr(dynamic_sampling, "gathered", ranks_here.gathered)
    monkeypatch.setattr(dynamic_sampling, "several_ranks", lambda: ranks > 1)

    def act(rank: int) -> DrawnGroups:
        first = draws(rank, -1, PLACES // ranks)
        return with_differing_groups(first, lambda *given: draws(rank, *given), tries, settings_of(rank, ranks))

    return ranks_here.run(act)


def dealt_plainly(seed: int, tries: int) -> tuple[list[int], GroupCounts, list[tuple[tuple[int, int, int], int]]]:
    """What is to be at each place, the counts, and what was left out, by another way: one list for all."""
    groups = [group_at(seed, -1, place) for place in range(PLACES)]
    replaced = dropped = 0
    left: list[tuple[tuple[int, int, int], int]] = []
    for attempt in range(tries):
        gaps = [place for place, (_, (one, two)) in enumerate(groups) if one == two]
        free = list(gaps)
        for place in range(len(gaps)):
            number, (one, two) = group_at(seed, attempt, place)
            if one == two:
                dropped += 1
                left.append(((attempt, 1, place), number))
            else:
                gap, *free = free
                left.append(((attempt, 0, gap), groups[gap][0]))
                groups[gap] = number, [one, two]
                replaced += 1
    kept = sum(one == two for _, (one, two) in groups)
    return [number for number, _ in groups], GroupCounts(replaced, kept, dropped), sorted(left)


@pytest.mark.parametrize("tries", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.long)], ids=["few", "more"])
def test_any_number_of_ranks_takes_the_same_groups(monkeypatch, ranks, tries, seeds):
    totals = GroupCounts()
    for seed in seeds:
        wanted, counts, left = dealt_plainly(seed, tries)
        found = drawn_on(monkeypatch, ranks, seed, tries)
        totals = totals + counts
        for rank, own in enumerate(found):
            assert own.counts == counts
            numbered = wanted[rank::ranks]
            check(own.samples, numbered)
            outcomes = [outcome for number in numbered for outcome in group_of(seed, number)]
            assert own.samples.scored.outcomes_B.tolist() == outcomes
        told = [
            (key, row.row_id, group_scores)
            for own in found
            for part in own.left_out
            for key, row, group_scores in zip(part.keys, part.rows, part.scores_B.view(-1, 2).tolist(), strict=True)
        ]
        assert sorted(told) == [(key, number, [10 + each for each in group_of(seed, number)]) for key, number in left]
    assert totals.replaced > 2 and totals.dropped > 2 and (totals.kept_equal > 2 or tries > 3)


def group_of(seed: int, number: int) -> list[float]:
    return group_at(seed, number // 100 - 1, number % 100)[1]
