"""References as rules read them, on GSM8K's forms and those of other files."""

from __future__ import annotations

from decimal import Decimal

import pytest

from training.utils.rewards.rules import as_text, equals, number_after_mark, numbers_of, truths_of


@pytest.mark.parametrize(
    ("reference", "numbers"),
    [
        ("6 * 7 = <<6*7=42>>42\n#### 42", [42]),
        ("#### none", []),
        (r"\boxed{\frac{1}{2}}", []),
        (r"\boxed{1} then \boxed{-2}", [-2]),
        ("50%", [50]),
        ("\N{EURO SIGN}1,234.50", [Decimal("1234.5")]),
        ("inf", []),
        ([1, "2", None], [1, 2]),
    ],
)
def test_numbers(reference, numbers):
    assert numbers_of(reference) == numbers


def test_numbers_as_text():
    assert [as_text(each) for each in (4, 4.0, 0.5, "4.0", float("inf"))] == ["4", "4", "0.5", "4.0", "inf"]
    assert number_after_mark("#### 1 #### 2") == 2 and number_after_mark("1") is None
    assert truths_of(None) == truths_of({}) == [] and truths_of("") == [""]
    assert equals(" 2.50 ", 2.5) and not equals("2,5", 2.5) and equals("inf", float("inf"))
