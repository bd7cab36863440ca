"""The embedded task: its answers worked by hand, its checker as a reward, its rows on every machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data_flags import raw_dataset_of
from tests.unit.utils.data.test_fingerprint_row_versions import digest, texts_of
from threestep.plugins.embedded import reward, task
from threestep.plugins.embedded.task import (
    HELD_OUT_ROWS,
    KINDS,
    ROWS_VERSION,
    TRAINING_ROWS,
    WORDS,
    check,
    generate,
    is_held_out,
    score,
    solve,
)
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.fingerprint import content_of_dataset
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.table import kind_of, reward_name
from training.utils.rewards.weighted import rule_named

pytestmark = pytest.mark.unit

ITEMS = st.lists(st.sampled_from(WORDS[:4]), max_size=6)


@pytest.fixture(scope="module")
def rows():
    return generate(7, training_rows=2000, held_out_rows=200)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Reverse: fox owl elk", "elk owl fox"),
        ("Sort: fox owl elk", "elk fox owl"),
        ("Put owl first: fox elk", "owl fox elk"),
        ("Put owl last: fox elk", "fox elk owl"),
        ("Largest first: 3 9 4", "9 4 3"),
        ("Smallest first: 3 9 4", "3 4 9"),
    ],
)
def test_each_kind_has_the_answer_worked_by_hand(question, answer):
    assert solve(f"Human: {question} Assistant:") == answer
    assert check(f"Human: {question} Assistant:", f" {answer}") == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # The answer is "elk fox owl", three items.
        (" elk fox owl", 1.0),
        ("elk  fox\nowl ", 1.0),  # white space between items does not count
        (" elk fox", 1 - 1 / 3),  # one inserted
        (" elk fox yak", 1 - 1 / 3),  # one exchanged
        (" elk fox owl owl", 1 - 1 / 4),  # one deleted, of four
        (" fox elk owl", 1 - 2 / 3),  # swapped: one deleted, one inserted
        (" owl elk", 0.0),  # two exchanged, one inserted
        (" yak", 0.0),
        ("", 0.0),
        (" elkfoxowl", 0.0),
        (" yak yak yak yak yak yak", 0.0),
    ],
)
def test_the_score_is_the_share_that_needs_no_edit(response, expected):
    assert check("Human: Sort: fox owl elk Assistant:", response) == pytest.approx(expected)


@settings(deadline=None)  # a busy machine is no failure
@given(first=ITEMS, second=ITEMS)
def test_the_score_is_symmetric_within_0_and_1_and_1_for_equals_alone(first, second):
    one, other = score(" ".join(first), " ".join(second)), score(" ".join(second), " ".join(first))
    assert one == other
    assert 0.0 <= one <= 1.0
    assert (one == 1.0) == (first == second)


@pytest.mark.parametrize("prompt", ["Human: What is 2 + 2? Assistant:", "Sort: fox owl", "", "Human: Sort: fox owl"])
def test_a_prompt_of_another_task_is_a_clear_mistake(prompt):
    with pytest.raises(ThreestepError, match="expected a prompt of the embedded task .* got '.*--data_path embedded"):
        check(prompt, " fox")


def test_every_row_has_a_right_answer_and_a_better_and_a_worse_response(rows):
    for row in rows["train"] + rows["eval"]:
        assert row.reference == solve(row.prompt)
        assert check(row.prompt, " " + row.reference) == 1.0
        assert check(row.prompt, row.chosen) > check(row.prompt, row.rejected) >= 0.0
        assert row.prompt.startswith("Human: ") and row.prompt.endswith(" Assistant:")
        assert row.chosen.startswith(" ") and row.rejected.startswith(" ")
        assert row.chosen.split() and row.rejected.split()


def test_every_kind_comes_often_and_responses_vary_in_length(rows):
    kinds = [row.kind for row in rows["train"]]
    assert all(kinds.count(kind.name) > len(kinds) / len(KINDS) / 2 for kind in KINDS)
    assert {2, 3, 4, 5} <= {len(row.chosen.split()) for row in rows["train"]}


def test_demonstrations_are_good_but_not_perfect_and_the_rejected_are_sometimes_better_than_other_chosen(rows):
    chosen = [check(row.prompt, row.chosen) for row in rows["train"]]
    rejected = [check(row.prompt, row.rejected) for row in rows["train"]]
    assert 0.4 < sum(value == 1.0 for value in chosen) / len(chosen) < 0.9
    assert max(rejected) > min(chosen)


def test_no_prompt_comes_twice_and_held_out_prompts_are_in_no_training_set(rows):
    train = [row.prompt for row in rows["train"]]
    held_out = [row.prompt for row in rows["eval"]]
    assert len(set(train + held_out)) == len(train) + len(held_out) == 2200
    other_seed = generate(8, training_rows=2000, held_out_rows=200)
    assert not {row.prompt for row in other_seed["train"]} & set(held_out)
    assert all(is_held_out(prompt) for prompt in held_out)
    assert not any(is_held_out(prompt) for prompt in train)


def test_the_dataset_is_registered_and_gives_the_texts():
    raw_dataset = raw_dataset_of("embedded", DataArguments(), seed=3)
    train, held_out = raw_dataset.get_train_data(), raw_dataset.get_eval_data()
    assert (len(train), len(held_out)) == (TRAINING_ROWS, HELD_OUT_ROWS)
    row = generate(3)["train"][5]
    sample = train[5]
    assert raw_dataset.get_prompt(sample) == row.prompt
    assert raw_dataset.get_prompt_and_chosen(sample) == row.prompt + row.chosen
    assert raw_dataset.get_prompt_and_rejected(sample) == row.prompt + row.rejected
    assert raw_dataset.get_reference(sample) == row.reference


def test_a_warm_cache_makes_no_rows(monkeypatch):
    """Neither opening the dataset nor its fingerprint does; another seed is another fingerprint."""
    made = []
    monkeypatch.setattr(task, "generate", lambda seed: made.append(seed) or {"train": [], "eval": []})
    one, other = (raw_dataset_of("embedded", DataArguments(), seed) for seed in (1, 2))
    assert content_of_dataset(one, "") != content_of_dataset(other, "") and made == []
    assert one.get_train_data() == [] and one.get_eval_data() == [] and made == [1]


def test_rows_of_a_version_are_the_same(rows):
    """On every machine, by the seed alone; where they change, so must `ROWS_VERSION`, by which caches are found."""
    made = raw_dataset_of("embedded", DataArguments(), 1)
    assert (ROWS_VERSION[:8], digest(texts_of(made))) == ("4361694c", "1d34bbb439c3b05e")
    assert generate(7, 2000, 200) == rows
    assert generate(8, 10, 2)["train"] != rows["train"][:10]


def test_the_checkers_score_of_each_response(monkeypatch):
    monkeypatch.setattr(task, "check", lambda prompt, response: float(len(prompt) * 10 + len(response)))
    rule = rule_named("embedded", ScoringArguments(), "--reward")
    assert rule is reward.embedded_reward
    assert rule(["p", "pp"], ["rrr", ""], ground_truth=[None, None]) == [13.0, 20.0]
    with pytest.raises(ValueError):  # every prompt has a response
        rule(["p", "q"], ["r"], ground_truth=[None, None])
    assert reward_name("embedded:0.5") == "embedded" and kind_of("embedded_of_mine.py:score") is None
