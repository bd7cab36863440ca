"""The text of a judge's questions, and the numbers in its replies. Knows no service.

A reply is read from its end: the last [[...]] is the verdict. Whatever else it says, and whatever stands in brackets
before, counts nothing; a reply without a verdict has no number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

POINTWISE, PAIRWISE = "pointwise", "pairwise"
FORMS = (POINTWISE, PAIRWISE)
GROUP, REFERENCE = "group", "ground_truth"
AGAINST = (GROUP, REFERENCE)
_QUESTION = """\
Please judge {what} to a user's question by these criteria:

{rubric}

[The question]
{prompt}
[The end of the question]
"""
_REFERENCE = """
[A reference answer]
{ground_truth}
[The end of the reference answer]
"""
_ONE = """
[The answer]
{response}
[The end of the answer]

Explain your judgement briefly. Then end with your rating from {lowest} to {highest}, alone on the last line and in \
two pairs of brackets: [[{lowest}]] is the worst, [[{highest}]] the best.
"""
_TWO = """
[Answer A]
{first}
[The end of answer A]

[Answer B]
{second}
[The end of answer B]

Explain your judgement briefly; their order says nothing about them. Then end with your verdict, alone on the last \
line: [[A]] if answer A is better, [[B]] if answer B is better, [[C]] if they are equally good.
"""
_FIELD = re.compile(r"\{(\w+)\}")
_FIELDS = {POINTWISE: ("prompt", "response"), PAIRWISE: ("prompt", "first", "second")}
_MORE_FIELDS = ("rubric", "ground_truth", "lowest", "highest", "what")
_VERDICT = re.compile(r"\[\[([^\[\]]*)\]\]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_OF_FIRST = {"A": 1.0, "B": 0.0, "C": 0.5}


@dataclass(frozen=True)
class RubricSettings:
    """The question of a judge.

    rubric: the criteria, in words. form: pointwise rates one response, pairwise compares two.
    question: the whole question instead of ours, with {prompt}, {response} (or {first} and {second}), {rubric}, ...
    with_reference: shows the row's ground_truth. scale: of the ratings, lowest and highest.
    against: pairwise: the other responses to the prompt, or the row's ground_truth.
    opponents: pairwise, of the group: the next so many responses that each is compared with; None: all.
    """

    rubric: str
    form: str = POINTWISE
    question: str | None = None
    with_reference: bool = False
    scale: list[float] | None = None
    against: str = GROUP
    opponents: int | None = None

    def check(self, where: str, mistakes: Mistakes) -> None:
        """Note every mistake in these settings, which come from `where`."""
        mistakes.require_one_of(f"{where}: form", self.form, FORMS)
        mistakes.require_one_of(f"{where}: against", self.against, AGAINST)
        mistakes.require(bool(self.rubric.strip()), f"{where}: rubric is empty; write the criteria there")
        lowest, highest = self.ends
        numbers = [type(end) in (int, float) for end in self.scale or (lowest, highest)]
        is_scale = len(numbers) == 2 and all(numbers) and lowest < highest
        mistakes.require(is_scale, f"{where}: scale expects [LOWEST, HIGHEST], got {self.scale}")
        is_pairwise = self.form == PAIRWISE
        mistakes.require(
            is_pairwise or (self.against == GROUP and self.opponents is None),
            f"{where}: against and opponents need form: pairwise, but form is {self.form}; remove them",
        )
        mistakes.require(not is_pairwise or self.scale is None, f"{where}: scale needs form: pointwise; remove it")
        mistakes.require(
            self.opponents is None or (self.opponents >= 1 and self.against == GROUP),
            f"{where}: opponents must be 1 or more and needs against: {GROUP}, but opponents is {self.opponents} and "
            f"against is {self.against}",
        )
        if self.question is not None and self.form in _FIELDS:
            self._check_question(self.question, where, mistakes)

    def _check_question(self, question: str, where: str, mistakes: Mistakes) -> None:
        named, needed = set(_FIELD.findall(question)), _FIELDS[self.form]
        unknown = sorted(named - {*needed, *_MORE_FIELDS})
        mistakes.require(
            not unknown,
            f"{where}: question has the unknown field {{{', '.join(unknown)}}}; it can use "
            f"{', '.join(f'{{{name}}}' for name in (*needed, *_MORE_FIELDS[:-1]))}",
        )
        lacking = [f"{{{name}}}" for name in needed if name not in named]
        mistakes.require(not lacking, f"{where}: question must contain {' and '.join(lacking)}")

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest rating."""
        given: Sequence[Any] = self.scale or (1, 10)
        return (given[0], given[1]) if len(given) == 2 else (0, 0)

    @property
    def reads_reference(self) -> bool:
        """True if the question shows the row's ground_truth."""
        return self.with_reference or "{ground_truth}" in (self.question or "")

    def text(self, **fields: str) -> str:
        """Return a question: of a prompt and a response, or of a prompt and two. What is put in is not read again: a
        response with {first} in it stays as it is."""
        lowest, highest = self.ends
        plain = {"rubric": self.rubric.strip(), "lowest": f"{lowest:g}", "highest": f"{highest:g}"}
        plain["what"] = "an assistant's answer" if self.form == POINTWISE else "two assistants' answers"
        reference = _REFERENCE if self.with_reference else ""
        template = self.question or _QUESTION + reference + (_ONE if self.form == POINTWISE else _TWO)
        return filled(template, {**plain, **fields})

    @property
    def reads(self) -> Callable[[str], float | None]:
        """Return the number in a reply; None if it has no verdict."""
        return self._rating if self.form == POINTWISE else _share_of_first

    def _rating(self, reply: str) -> float | None:
        lowest, highest = self.ends
        word = last_verdict(reply)
        if word is None or not _NUMBER.fullmatch(word):
            return None
        rating = float(word)
        return rating if lowest <= rating <= highest else None


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return a template with its {fields}; others stay as they are."""
    return _FIELD.sub(lambda found: fields.get(found[1], found[0]), template)


def last_verdict(reply: str) -> str | None:
    """Return the text in the last double brackets; None if there are none."""
    found = _VERDICT.findall(reply)
    return found[-1].strip() if found else None


def _share_of_first(reply: str) -> float | None:
    """1 if the first answer is better, 0 if the second is, 0.5 for a draw."""
    return _OF_FIRST.get((last_verdict(reply) or "").upper())
