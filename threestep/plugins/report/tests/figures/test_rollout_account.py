"""The account of a run's prompts finds what was lost and what was taken twice."""

from __future__ import annotations

import json

from threestep.plugins.report.figures.rollout_account import NOT_DRAWN, WAITING, rollout_account
from training.step3_ppo.contracts.rollouts import RolloutEvents, RolloutsOfStep, Times
from training.utils.run.run_folder import LOGS, ROLLOUTS, RunLog, read_rollouts


def step(first: int, rows: list[int], **left_out: list[int]) -> dict:
    return {"step": first // 2 + 1, "version": 0, "first": first, "prompts": 3, "rows": rows, "left_out": left_out}


def test_an_epoch_of_which_each_prompt_was_learned_from_or_has_a_reason():
    lines = [step(0, [2, 0]), step(2, [1, 0], cut=[1]), step(4, [2, 1])]
    first, second = rollout_account(lines)
    assert first.is_whole and (first.learned, dict(first.left_out)) == (2, {"cut": 1})
    assert second.is_whole and (second.learned, dict(second.left_out)) == (3, {})
    assert first.sentence() == "epoch 1: 2 of 3 prompts were learned from once; 1 were not: cut"


def test_what_the_end_of_a_run_leaves_out_has_its_reason():
    lines = [step(0, [2, 0]), {"step": 2, "version": 0, "first": 2, "prompts": 3, "unused": "it ended"}]
    (first,) = rollout_account(lines)
    assert first.is_whole and dict(first.left_out) == {"it ended": 1}
    (first,) = rollout_account(lines[:1])
    assert first.is_whole and dict(first.left_out) == {NOT_DRAWN: 1}
    assert first.sentence().endswith(f"1 were {NOT_DRAWN}")


def groups(positions: list[int], pending: list[int], rows: list[int] | None = None) -> dict:
    line = {"step": 1, "prompts": 4, "positions": positions, "versions": [0] * len(positions), "pending": pending}
    return {**line, "rows": rows or positions, "left_out": {}}


def test_groups_that_are_taken_as_they_end_wait_or_are_lost():
    (open_run,) = rollout_account([groups([0, 3], [1, 2])])
    assert open_run.is_whole and open_run.left_out == {WAITING: 2} and "2 are drawn, or being" in open_run.sentence()
    (over,) = rollout_account([groups([0, 3], [1, 2]), groups([1, 2], [])])
    assert over.is_whole and over.learned == 4
    (lost,) = rollout_account([groups([0, 3], [1]), groups([1], [])])
    assert lost.lost == [2] and not lost.is_whole
    (gone,) = rollout_account([groups([0, 3], [1, 2]), groups([1], [])])  # it waited once, and no longer does
    assert gone.lost == [2]
    (twice,) = rollout_account([groups([0, 3], [1, 2]), groups([1, 2], [], [1, 0])])
    assert twice.twice == [0] and not twice.is_whole
    unused = {"step": 1, "prompts": 4, "positions": [1, 2], "unused": "it ended"}
    (ended,) = rollout_account([groups([0, 3], [1, 2]), unused])
    assert ended.is_whole and ended.left_out == {"it ended": 2}


def test_what_was_lost_or_taken_twice_is_named():
    lost = rollout_account([step(0, [2, 0]), step(4, [2, 1])])
    assert [each.is_whole for each in lost] == [False, False]
    assert lost[0].lost == [2] and "LOST: 1 (positions 2)" in lost[0].sentence()
    (again,) = rollout_account([step(0, [2, 0]), step(2, [2])])
    assert again.twice == [2] and not again.is_whole and "TWICE: 1 (rows 2)" in again.sentence()
    (same,) = rollout_account([step(0, [2, 0]), step(0, [2, 0])])
    assert same.twice == [0, 2] and not same.is_whole
    assert rollout_account([]) == []


def test_whole_lines_are_read(tmp_path):
    assert read_rollouts(tmp_path) == [] and ROLLOUTS in LOGS  # it is cut with the others when a run resumes
    (tmp_path / ROLLOUTS).write_text(f'{json.dumps(step(0, [1]))}\n{{"other": 1}}\n[]\n{{"step": 1, ')
    assert [line["rows"] for line in read_rollouts(tmp_path)] == [[1]]


def test_the_log_that_a_run_writes_is_accounted_for(tmp_path):
    events = RolloutEvents(RunLog(tmp_path / "rollouts.jsonl"), "hf", prompts=4, per_step=2)
    events.trained(RolloutsOfStep(1, 0, (), (), 0.5, Times(1.0, 2.0, 3.0)), [(3, None), (1, "cut")])
    events.trained(RolloutsOfStep(2, 0, (), ()), [(0, None), (2, None)])
    events.unused([(3, 1)], "the run ended")
    (account,) = rollout_account(read_rollouts(tmp_path))
    assert account.is_whole and account.learned == 3
