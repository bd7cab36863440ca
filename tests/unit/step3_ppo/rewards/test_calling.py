"""What a reward function is given, and what it may answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.step3_ppo.rewards.calling import call_rule, reward_columns
from training.utils.data.phases import PromptRow
from training.utils.run.errors import ThreestepError


def row(reference, **columns):
    return PromptRow(0, np.zeros(1, np.int32), "p", reference, columns)


def test_one_value_a_row_and_none_where_it_has_none():
    rows = [row("1", data_source="a", level=3), row(None, data_source="b", info={"index": 2})]
    assert reward_columns(rows) == {
        "ground_truth": ["1", None],
        "data_source": ["a", "b"],
        "level": [3, None],
        "info": [None, {"index": 2}],
    }


def test_the_columns_do_not_depend_on_the_batch():
    names = ["data_source", "info", "level"]
    assert reward_columns([row("1", data_source="a", level=3)], names).keys() == {"ground_truth", *names}
    assert reward_columns([row("1")]) == {"ground_truth": ["1"], "data_source": [None]}


def test_scores_alone_or_with_values_to_log():
    def lengths(prompts, responses, *, bonus, **columns):
        scores = [len(response) + more for response, more in zip(responses, bonus, strict=True)]
        return (scores, {"bonus": bonus}) if prompts[0] else np.array(scores)

    columns = {"bonus": [1, 0.5], "ground_truth": [None, None]}
    assert call_rule(lengths, ["p", "q"], ["ab", ""], columns) == ([3.0, 0.5], {"bonus": [1.0, 0.5]})
    assert call_rule(lengths, ["", ""], ["ab", ""], columns) == ([3.0, 0.5], {})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0], "reward function 'answers': expected 2 numbers, one a response, got 1"),
        (None, "reward function 'answers': expected a list of 2 numbers, got NoneType"),
        ({"score": 1}, "reward function 'answers': expected a list of 2 numbers, got dict"),
        ([1.0, math.nan], "reward function 'answers': expected a finite number, got nan for the response 'no'"),
        ([True, "1"], "reward function 'answers': expected a finite number, got '1' for the response 'no'"),
        (([1, 2], {"n": [1]}), "reward function 'answers', value 'n': expected 2 numbers, one a response, got 1"),
    ],
)
def test_other_answers(answer, said):
    def answers(prompts, responses, **columns):
        return answer

    with pytest.raises(ThreestepError) as caught:
        call_rule(answers, ["p", "q"], ["yes", "no"], {})
    assert str(caught.value) == said
