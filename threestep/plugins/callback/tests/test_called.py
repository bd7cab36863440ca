"""Answers of a callback: nothing, "stop", figures, or a sentence that ends the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.utils.checkpoints.test_loop import last_step, opened, plan
from threestep.plugins.callback.called import Called, check_callback, load_callback, open_course
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
            '--callback: the function must return None, "stop" or a dict of metrics, got True; return None',
        ),
        ("halt", "got 'halt'"),
        ({"a": "1"}, "--callback: returned metrics must map names to numbers, got 'a': '1'"),
        ({"a": True}, "got 'a': True"),
        ({1: 2.0}, "got 1: 2.0"),
        ({"train/loss": 1.0}, "the step already has a metric 'train/loss'; return yours under another name"),
        ({"seconds": 1.0}, "already has a metric 'seconds'"),
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
        (lambda state: None, r"got <lambda>, which has a different signature \(too many positional arguments\); write"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(callback, got):
    with pytest.raises(ThreestepError, match=f"^--callback expects a function .step, figures., {got}"):
        check_callback(callback)


def test_what_can_be_called(tmp_path):
    for callback in (Follower(), lambda *both: None, lambda step, figures, more=1: None, max):
        check_callback(callback)
    (tmp_path / "own.py").write_text("def follow(step): ...\ndef other(step, figures): ...\n")
    assert load_callback(f"{tmp_path}/own.py:other").__name__ == "other"
    with pytest.raises(ThreestepError, match="got follow, which has a different signature"):
        load_callback(f"{tmp_path}/own.py:follow")


def ended(
    place: Path, losses: dict[int, float], callback: str | None = None, resume: str | None = None, **flags: Any
) -> int:
    course = open_course({"callback": callback})
    return last_step(opened(plan(place, resume=resume, **flags), place, course=[course] if course else []), losses)


LOSSES = {1: 3.0, 2: 1.0, 4: 2.0, 6: 1.0}


def own_callback(folder: Path, body: str) -> str:
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(f"def seen(step, figures):\n    {body}\n")
    return f"{folder}/own.py:seen"


def test_a_callback_ends_the_run_and_adds_figures(tmp_path, capsys):
    own = own_callback(
        tmp_path / "own", "return 'stop' if figures.get('eval/loss') == 2.0 else {'own/twice': 2 * step}"
    )
    assert ended(tmp_path / "a", LOSSES, own, save_at_end=True) == 4
    assert 'training ends after step 4: the callback returned "stop"' in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("own/twice") for line in lines] == [2, 2, 4, 4, 6, 8, None]
    assert ended(tmp_path / "a", LOSSES, own, resume="latest") == 4  # it is over
    assert ended(tmp_path / "a", LOSSES, resume="latest") == 10  # without it, prolonged


def test_a_callbacks_mistake_ends_the_run(tmp_path):
    own = own_callback(tmp_path / "own", "return None if step < 3 else 1 / 0")
    with pytest.raises(ThreestepError, match=r"^--callback: seen raised ZeroDivisionError: .* \(own.py, line 2\)$"):
        ended(tmp_path / "b", LOSSES, own)
    own = own_callback(tmp_path / "other", "return 1 / (3 - step)")
    with pytest.raises(ThreestepError, match="^--callback: the function must return None, .*, got 0.5; return None"):
        ended(tmp_path / "a", LOSSES, own)


def test_checkpoints_of_earlier_versions_say_that_it_ended_the_run():
    for state in ({"called": True}, {"early_end": {"called": True}}):
        course = open_course({"callback": f"{__file__}:last_step"})
        assert course is not None
        course.resumed(state)
        assert course.end_reason() == 'the callback returned "stop"'
