"""Learning-rate schedules against their formulas, and against transformers where it has them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from training.utils.base.errors import Mistakes
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.config.schedules import OWN_SCHEDULES, SCHEDULES, ScheduleShape, share_of_peak
from training.utils.engine.training_engine import _scheduler
from training.utils.flags.flags import note_mistakes


def shares(name: str, shape: ScheduleShape, steps: int) -> list[float]:
    return [share_of_peak(step, shape, OWN_SCHEDULES[name].after_warmup) for step in range(steps)]


def rates(settings: EngineSettings, total_steps: int, steps: int) -> list[float]:
    """As an engine steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    scheduler, found = _scheduler(optimizer, settings, total_steps), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "wsd"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_by_default_they_are_transformers_to_the_bit(name, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    if name == "constant" and warmup:  # which transformers' leaves out
        theirs = get_scheduler("constant_with_warmup", optimizer, warmup, 11)
    else:
        theirs = get_scheduler(name, optimizer, warmup, 11)
    found = rates(EngineSettings(learning_rate=3e-4, lr_scheduler_type=name, num_warmup_steps=warmup), 11, 14)
    for rate in found:
        assert rate == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(5, 5), (7, 5), (0, 1), (1, 1), (0, 0), (4, 5)])
def test_a_run_with_no_step_after_its_warmup_has_a_rate_at_each(name, warmup, total):
    """Also after the last step, when the schedule is stepped once more."""
    found = rates(EngineSettings(learning_rate=3e-4, lr_scheduler_type=name, num_warmup_steps=warmup), total, total + 1)
    assert all(math.isfinite(rate) and 0.0 <= rate <= 3e-4 for rate in found)
    if name != "constant":
        assert found[: min(warmup, total)] == pytest.approx([3e-4 * n / warmup for n in range(min(warmup, total))])


def test_by_hand():
    """Two steps of warm-up: 0, 0.5. Four more with a floor of 0.1: linear 1, 0.775, 0.55, 0.325 and 0.1; the
    cosine's (1 + cos(pi t / 4)) / 2 is 1, 0.8536, 0.5, 0.1464, 0. wsd
    with half of them stable: 1, 1, then (1 + cos(pi / 2)) / 2."""
    shape = ScheduleShape(warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
    assert shares("linear", shape, 8) == pytest.approx([0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1])
    assert shares("constant", ScheduleShape(2, 6), 4) == pytest.approx([0.0, 0.5, 1.0, 1.0])
    wave = [0.1 + 0.9 * value for value in (1.0, 0.853553, 0.5, 0.146447, 0.0)]
    assert shares("cosine", shape, 7) == pytest.approx([0.0, 0.5, *wave], abs=1e-6)
    half = ScheduleShape(2, 6, min_lr_ratio=0.1, stable_ratio=0.5)
    assert shares("wsd", half, 8) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 20), (5, 5), (9, 4)])
@pytest.mark.parametrize(("floor", "stable"), [(0.0, 0.9), (0.3, 0.25)])
def test_verls_formulas_line_by_line(warmup, total, floor, stable):
    """The cosine of verl's get_cosine_schedule_with_warmup, x (1 - m) / 2 + (1 + m) / 2 and at least m; its wsd, of
    which int(remaining x stable_ratio) steps stay."""
    shape = ScheduleShape(warmup, total, floor, stable)
    for step in range(total + 3):
        if step < warmup:
            wave = decay = step / max(1, warmup)
        else:
            x = math.cos(math.pi * (step - warmup) / max(1, total - warmup))
            wave = max(floor, x * (1.0 - floor) / 2 + (1.0 + floor) / 2)
            remaining = max(0, total - warmup)
            stays = int(remaining * stable)
            decay = floor
            if step < warmup + stays:
                decay = 1.0
            elif step < total:
                part = (step - warmup - stays) / max(1, remaining - stays)
                decay = (1.0 - floor) * max(0.0, 0.5 * (1.0 + math.cos(math.pi * part))) + floor
        assert share_of_peak(step, shape, OWN_SCHEDULES["cosine"].after_warmup) == pytest.approx(wave, abs=1e-12)
        assert share_of_peak(step, shape, OWN_SCHEDULES["wsd"].after_warmup) == pytest.approx(decay, abs=1e-12)


def test_the_engine_takes_its_settings():
    settings = EngineSettings(
        learning_rate=2.0, lr_scheduler_type="wsd", num_warmup_steps=2, min_lr_ratio=0.1,
        stable_ratio=0.5,
    )  # fmt: skip
    assert rates(settings, 6, 8) == pytest.approx([0.0, 1.0, 2.0, 2.0, 2.0, 1.1, 0.2, 0.2])
    state = _scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), settings, 6).state_dict()
    assert state["lr_lambdas"] == [{}]  # a resumed run takes the schedule of its own settings


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lr_scheduler_type": "constant", "min_lr_ratio": 0.1},
         "--min_lr_ratio 0.1 is for the schedules linear, cosine, wsd, and --lr_scheduler_type is constant; leave"),
        ({"stable_ratio": 0.5}, "--stable_ratio 0.5 is for the schedules wsd, and --lr_scheduler_type is cosine"),
        ({"lr_scheduler_type": "inverse_sqrt", "min_lr_ratio": 0.5},
         "--min_lr_ratio 0.5 is for the schedules linear, cosine, wsd, and --lr_scheduler_type is inverse_sqrt"),
        ({"min_lr_ratio": 1.5}, "--min_lr_ratio expects a number from 0 to 1, got 1.5"),
    ],
)  # fmt: skip
def test_settings_that_the_schedule_does_not_read_are_refused(flags, said):
    mistakes = Mistakes()
    note_mistakes(EngineArguments(**flags), mistakes)
    (found,) = mistakes.sentences
    assert said in found
