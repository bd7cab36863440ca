"""References as rules read them: a text or a number, or a list of these, any of which is right."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

Truth = str | int | float
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", re.ASCII)
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", **dict.fromkeys("$\\\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}")})
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
MARK = "####"


def truths_of(reference: Any) -> list[Truth]:
    """The texts and numbers of a reference; none of null, NaN (a null that pandas wrote) and objects."""
    given = reference if isinstance(reference, list) else [reference]
    return [each for each in given if isinstance(each, (str, int, float)) and each == each]  # noqa: PLR0124 - NaN


def equals(text: str, truth: Truth) -> bool:
    """True if a text is the truth, without the white space around it. A number of JSON or Parquet is equal to each
    plain decimal text of its value: 4 and 4.0 to "4" and "4.0"."""
    text = text.strip()
    if isinstance(truth, (bool, str)):
        return text == str(truth).strip()
    return text == str(truth) or (_PLAIN.fullmatch(text) is not None and Decimal(text) == Decimal(str(truth)))


def as_text(truth: Truth) -> str:
    """A truth as text; a whole number without a fraction, whatever its type."""
    is_whole = isinstance(truth, float) and math.isfinite(truth) and truth == int(truth)
    return str(int(truth)) if is_whole else str(truth)


def number_after_mark(text: str) -> Decimal | None:
    """The first number after the last "####"; None without either."""
    _, mark, tail = text.rpartition(MARK)
    return _first_number(tail) if mark else None


def numbers_of(reference: Any) -> list[Decimal]:
    """The numbers of a reference: those of JSON; of a text the one after "####", otherwise in the last \\boxed{...},
    otherwise the only one, with commas between thousands and units as in "$1,800". None of a text with several."""
    found = (
        Decimal(str(truth)) if not isinstance(truth, str) else _number_in(truth)
        for truth in truths_of(reference)
        if not isinstance(truth, bool)
    )
    return [number for number in found if number is not None and number.is_finite()]


def _number_in(text: str) -> Decimal | None:
    if MARK in text:
        return number_after_mark(text)
    boxed = _BOXED.findall(text)
    text = (boxed[-1] if boxed else text).translate(_SIGNS).strip()
    try:
        return Decimal(text.replace(",", ""))  # also 1e3
    except InvalidOperation:
        return _first_number(text) if len(_NUMBER.findall(text)) == 1 else None


def _first_number(text: str) -> Decimal | None:
    match = _NUMBER.search(text.translate(_SIGNS))
    return None if match is None else Decimal(match.group().replace(",", ""))
