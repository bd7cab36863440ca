"""Answers of a callback: nothing, "stop", figures, or a sentence that all ranks end with."""

from __future__ import annotations

import math

import pytest

from training.utils.run.step_callback import StepCallback


def test_answers():
    seen = []
    answers = iter([None, {"own/a": 1, "own/b": math.inf}, "stop"])
    callback = StepCallback(lambda step, figures: (seen.append((step, figures)), next(answers))[1])
    figures = {"train/loss": 0.5}
    assert callback.figures(1, figures) == {}
    added = callback.figures(2, figures)
    assert added["own/a"] == 1.0 and math.isnan(added["own/b"]) and not callback.stops
    assert callback.figures(3, figures) == {} and callback.stops and callback.problem is None
    assert [step for step, _ in seen] == [1, 2, 3] and all(got == figures and got is not figures for _, got in seen)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            True,
            '--callback: the function expects to return None, "stop" or figures as a dict, got True; leave out other',
        ),
        ("halt", "got 'halt'"),
        ({"a": "1"}, "--callback: figures expect numbers by name, got 'a': '1'"),
        ({"a": True}, "got 'a': True"),
        ({1: 2.0}, "got 1: 2.0"),
        ({"train/loss": 1.0}, "expect names of their own, got 'train/loss', which the step has; rename it"),
        ({"seconds": 1.0}, "got 'seconds'"),
    ],
)
def test_other_answers(answer, sentence):
    calls = []
    callback = StepCallback(lambda step, figures: calls.append(step) or answer)
    assert callback.figures(1, {"train/loss": 0.5}) == {}
    assert sentence in callback.problem and not callback.stops
    callback.figures(2, {})
    assert calls == [1]  # the run is about to end
