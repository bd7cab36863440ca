"""Samples side by side, what was left out, settings that differ."""

from __future__ import annotations

from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.figures.tables import (
    sampled_rows,
)


def steps_of(*folders):
    return [step for run in read_runs(folders) for step in run.steps]


def sample(step: int, index: int, reward: float, **more) -> dict:
    return {"step": step, "uid": str(index), "prompt": f"p{index}", "response": f"r{step}", "reward": reward, **more}


def test_samples_stand_side_by_side(ppo_run):
    gains = [0, 0, 0, 0, 3, -2, 0, 5, -4]
    samples = [sample(0, index, 1.0) for index in range(9)]
    samples += [sample(7, index, 1.0 + gain, ended=index != 0) for index, gain in enumerate(gains)]
    rows = sampled_rows(steps_of(ppo_run(samples=samples)))
    assert [(row.why, row.prompt) for row in rows] == [
        *(("The first", f"p{index}") for index in range(4)),
        ("Rose most", "p7"), ("Rose most", "p4"), ("Fell most", "p8"), ("Fell most", "p5"),
    ]  # fmt: skip
    assert [(answer.column, answer.text, answer.marks[0]) for answer in rows[4].answers] == [
        ("SFT", "r0", ("reward", 1.0)), ("PPO", "r7", ("reward", 6.0))
    ]  # fmt: skip
    assert [answer.ended for answer in rows[0].answers] == [True, False]
