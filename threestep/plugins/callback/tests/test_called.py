"""Answers of a callback: nothing, "stop", figures, or a sentence that all ranks end with."""

from __future__ import annotations

import math

import pytest

from threestep.plugins.callback.called import Called, check_callback, load_callback
from training.utils.base.errors import ThreestepError


def test_answers():
    seen = []
    answers = iter([None, {"own/a": 1, "own/b": math.inf}, "stop"])
    callback = Called(lambda step, figures: (seen.append((step, figures)), next(answers))[1])
    figures = {"train/loss": 0.5}
    assert callback.figures(1, figures) == {}
    added = callback.figures(2, figures)
    assert added["own/a"] == 1.0 and math.isnan(added["own/b"]) and callback.end_reason() is None
    assert callback.figures(3, figures) == {} and callback.end_reason() == 'the callback returned "stop"'
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
    callback = Called(lambda step, figures: calls.append(step) or answer)
    assert callback.figures(1, {"train/loss": 0.5}) == {}
    with pytest.raises(ThreestepError) as problem:
        callback.end_reason()
    assert sentence in str(problem.value)
    callback.figures(2, {})
    assert calls == [1]  # the run is about to end


class OfTrainers:
    def on_step_end(self, args, state, control, **others):
        return control


class Follower:
    def __call__(self, step, figures):
        return None


@pytest.mark.parametrize(
    ("callback", "got"),
    [
        (OfTrainers, "got the class OfTrainers, a callback of transformers' Trainer; write `def follow"),
        (OfTrainers(), "got an object of OfTrainers, a callback of transformers' Trainer; write"),
        (Follower, "got the class Follower; write"),
        ([Follower()], "got an object of list; write"),
        (lambda state: None, r"got <lambda>, which takes other arguments \(too many positional arguments\); write"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(callback, got):
    with pytest.raises(ThreestepError, match=f"^--callback expects a function .step, figures., .*, {got}"):
        check_callback(callback)


def test_what_can_be_called(tmp_path):
    for callback in (Follower(), lambda *both: None, lambda step, figures, more=1: None, max):
        check_callback(callback)
    (tmp_path / "own.py").write_text("def follow(step): ...\ndef other(step, figures): ...\n")
    assert load_callback(f"{tmp_path}/own.py:other").__name__ == "other"
    with pytest.raises(ThreestepError, match="got follow, which takes other arguments"):
        load_callback(f"{tmp_path}/own.py:follow")
