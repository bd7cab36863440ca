"""Sentences for users."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes, ThreestepError, first_line, nearest_names


def test_nearest_names():
    names = ["data_path", "data_split", "seed"]
    assert nearest_names("data_pth", names) == "; did you mean 'data_path' or 'data_split'?"
    assert nearest_names("sed", names) == "; did you mean 'seed'?"
    assert nearest_names("zzz", names) == ""
    assert nearest_names("x", []) == ""


def test_one_mistake_is_its_own_sentence():
    mistakes = Mistakes()
    mistakes.raise_if_any()
    mistakes.require(True, "fine")
    mistakes.raise_if_any()
    mistakes.require(False, "too small")
    with pytest.raises(ThreestepError, match="^too small$"):
        mistakes.raise_if_any()


def test_several_are_told_together():
    mistakes = Mistakes()
    mistakes.add("a")
    mistakes.add("b")
    with pytest.raises(ThreestepError, match="^2 mistakes in the configuration:\n  - a\n  - b$"):
        mistakes.raise_if_any()


def test_the_same_mistake_is_told_once_with_its_count():
    mistakes = Mistakes()
    for _ in range(200):
        mistakes.add("a")
    with pytest.raises(ThreestepError, match="^a [(]200 times[)]$"):
        mistakes.raise_if_any()
    mistakes.add("b")
    with pytest.raises(ThreestepError, match="^2 mistakes in the configuration:\n  - a [(]200 times[)]\n  - b$"):
        mistakes.raise_if_any()


def test_many_different_mistakes_stay_readable():
    mistakes = Mistakes()
    for number in range(1200):
        mistakes.add(f"mistake {number}")
    with pytest.raises(ThreestepError) as raised:
        mistakes.raise_if_any()
    first, *lines = str(raised.value).splitlines()
    assert first.startswith("1,200 mistakes") and len(lines) < 30 and lines[-1].endswith("more")


def test_a_mistake_is_a_value_error():
    assert issubclass(ThreestepError, ValueError)


def test_a_line_that_is_cut_shows_no_half_of_a_password():
    """The address begins at character 180, and the line ends at 200, amid the password."""
    text = "x" * 179 + " https://user:a-long-password@host/rows.jsonl could not be read\nand more"
    assert first_line(OSError(text)) == ("x" * 179 + " https://***@host/rows.jsonl could not be read")[:200]
    assert first_line(OSError()) == "OSError"
