"""The text of questions, and the numbers in replies."""

from __future__ import annotations

import pytest

from threestep.plugins.judges.rubric import PAIRWISE, RubricSettings
from training.utils.base.errors import Mistakes, ThreestepError


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("[[7]]", 7.0),
        ("Well.\n[[ 7.5 ]]", 7.5),
        ("Its answer says [[10]], which is wrong.\n[[2]]", 2.0),
        ("[[1]] and [[10]]", 10.0),
        ("<think>[[3]]</think> Rating: [[4]].", 4.0),
        ("7", None),
        ("", None),
        ("[[7/10]]", None),
        ("[[11]]", None),
        ("[[0]]", None),
        ("[[-3]]", None),
        ("[[nan]]", None),
        ("[[inf]]", None),
        ("[[1e1]]", None),
        ("[7]", None),
        ("[[7", None),
        ("[[8]] on reflection [[none]]", None),
    ],
)
def test_a_rating_is_the_last_verdict_within_the_scale(reply, rating):
    assert RubricSettings("Short.").reads(reply) == rating


def test_a_comparison_is_one_of_three_letters():
    reads = RubricSettings("Short.", PAIRWISE).reads
    assert [reads(f"So: [[{word}]]") for word in ("A", "B", "C", "a", "D", "A>B", "")] == [
        1.0, 0.0, 0.5, 1.0, None, None, None,
    ]  # fmt: skip


def test_what_is_put_in_is_not_read_again():
    text = RubricSettings("Be {prompt} {kind}.").text(prompt="{response}", response="{rubric} {{}", ground_truth="None")
    assert "Be {prompt} {kind}." in text and "[The question]\n{response}\n" in text
    assert "[The answer]\n{rubric} {{}\n[The end of the answer]" in text and "reference" not in text
    text = RubricSettings("x", with_reference=True, scale=[0, 1.5]).text(prompt="p", response="r", ground_truth="5")
    assert "[A reference answer]\n5\n" in text and "[[0]] is the worst, [[1.5]] the best" in text
    text = RubricSettings("x", PAIRWISE).text(prompt="p", first="one", second="two", ground_truth="5")
    assert "[Answer A]\none\n" in text and "[Answer B]\ntwo\n" in text and "two assistants' answers" in text
    own = RubricSettings("x", question="{rubric}: {prompt}|{response}|{ground_truth}")
    assert own.text(prompt="p", response="r", ground_truth="5") == "x: p|r|5" and own.reads_reference


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"form": "pair"}, "form expects one of pointwise, pairwise, got 'pair'; did you mean 'pairwise'"),
        ({"rubric": " "}, "rubric expects the criteria, got nothing"),
        ({"scale": [1, 1]}, r"scale expects \[LOWEST, HIGHEST\], got \[1, 1\]"),
        ({"scale": [1]}, r"scale expects \[LOWEST, HIGHEST\], got \[1\]"),
        ({"scale": [1, "5"]}, r"scale expects \[LOWEST, HIGHEST\]"),
        ({"against": "ground_truth"}, "against and opponents are of form: pairwise, and this one is pointwise"),
        ({"form": PAIRWISE, "scale": [1, 5]}, "scale is for form: pointwise"),
        ({"form": PAIRWISE, "opponents": 0}, "opponents expects 1 or more"),
        ({"form": PAIRWISE, "opponents": 1, "against": "ground_truth"}, "opponents expects 1 or more, and against: gr"),
        ({"question": "{prompt} {answer}"}, "question has {answer}, which stands for nothing; it may have {prompt}, "),
        ({"question": "{prompt}"}, "question expects {response}, and has none; add it"),
        ({"form": PAIRWISE, "question": "{prompt}{first}"}, "question expects {second}, and has none"),
    ],
)
def test_mistakes_are_sentences(changes, sentence):
    mistakes = Mistakes()
    RubricSettings(**{"rubric": "Short.", **changes}).check("judge.yaml", mistakes)
    with pytest.raises(ThreestepError, match=f"judge.yaml: {sentence}"):
        mistakes.raise_if_any()
