"""Rollouts that are learned from as they end: whatever the timing each prompt once, by weights of a bounded age, and
the same run again from its schedule. A tiny real model draws and trains."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from threestep.plugins.ahead.admission import Admission
from threestep.plugins.ahead.arguments import AheadArguments
from threestep.plugins.ahead.schedule import read_schedule
from threestep.plugins.ahead.tests.test_pipeline import (
    PROMPTS,
    STEPS,
    FailingRollout,
    made_trainer,
    same,
    trained,
    weights,
)
from threestep.plugins.report.figures.rollout_account import WAITING, rollout_account
from training.step3_ppo.contracts.rollouts import RolloutEvents
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.run.run_folder import RunLog, read_rollouts

GROUPS = 4  # of a step, of all ranks


class LateGroups(TransformersRollout):
    """Some groups take long, which ones no seed decides; `at_once` counts those that are drawn at a time."""

    def __init__(self):
        super().__init__()
        self.drawing = self.at_once = 0
        self.lock = threading.Lock()

    def roll_out(self, model, request):
        with self.lock:
            self.drawing += 1
            self.at_once = max(self.at_once, self.drawing)
        dice = random.SystemRandom()
        time.sleep(dice.choice([0.0, 0.0, 0.0, 0.05]) + dice.uniform(0.0, 0.01))
        rollout = super().roll_out(model, request)
        with self.lock:
            self.drawing -= 1
        return rollout


class FirstIsLast(TransformersRollout):
    """The prompt of one row ends behind eight others."""

    def __init__(self, late):
        super().__init__()
        self.late, self.ended = late, 0
        self.changed = threading.Condition()

    def roll_out(self, model, request):
        with self.changed:
            if request.rows[0].row_id == self.late:
                assert self.changed.wait_for(lambda: self.ended >= 8, timeout=120)
        rollout = super().roll_out(model, request)
        with self.changed:
            self.ended += 1
            self.changed.notify_all()
        return rollout


def free(oldest: int, schedule: str | None = None) -> AheadArguments:
    return AheadArguments("free", oldest, None if schedule is None else str(schedule))


def free_trainer(folder: Path, engine=None, *, oldest=2, schedule=None, total=STEPS, **given) -> PpoTrainer:
    trainer = made_trainer(free(oldest, schedule), engine or LateGroups(), total=total, **given)
    trainer.events = RolloutEvents(RunLog(folder / "rollouts.jsonl"), "hf", len(PROMPTS), GROUPS)
    return trainer


def train(trainer: PpoTrainer, steps: range) -> list[float]:
    """Take these steps, with a line of the log for each; return the greatest age of each."""
    ages = []
    for step in steps:
        for prompts, rollout in trainer.rollouts(step):
            trainer.learn([trainer.experience_of(trainer.score(prompts, rollout), step)], step, prompts.rows)
        trainer.note_drawn(step)
        ages.append(trainer.queue.figures()["rollout/age_max"])
    return ages


def lines_of(folder: Path) -> list[dict]:
    clock = ("asked", "began", "ended", "servers", "waited", "trained")
    return [{name: own for name, own in line.items() if name not in clock} for line in read_rollouts(folder)]


@pytest.mark.parametrize("oldest", [1, 3])
def test_each_prompt_is_learned_from_once_by_weights_that_are_not_too_old(tmp_path, oldest):
    engine = LateGroups()
    trainer = free_trainer(tmp_path, engine, oldest=oldest)
    for step in range(1, STEPS + 1):
        ages = train(trainer, range(step, step + 1))
        assert max(ages) <= oldest
        (account,) = rollout_account(read_rollouts(tmp_path))
        assert account.is_whole and account.learned == step * GROUPS
        pending = read_rollouts(tmp_path)[-1]["pending"]
        assert account.left_out.get(WAITING, 0) == len(pending) == min(oldest, STEPS - step) * GROUPS
    assert 1 < engine.at_once <= 4
    assert train(made_trainer(free(1), LateGroups()), range(1, 2)) == [0.0]


def test_the_schedule_repeats_the_run_to_the_bit(tmp_path):
    """And another order is another run: a slow group is overtaken until it would be too old."""
    for name in ("first", "0", "1", "other"):
        (tmp_path / name).mkdir()
    first = free_trainer(tmp_path / "first")
    train(first, range(1, STEPS + 1))
    for name in ("0", "1"):
        again = free_trainer(tmp_path / name, schedule=str(tmp_path / "first" / "rollouts.jsonl"))
        train(again, range(1, STEPS + 1))
        assert same(weights(again), weights(first))
        assert lines_of(tmp_path / name) == lines_of(tmp_path / "first")
    late = made_trainer(0).next_prompts(1, 0)[0].rows[0].row_id
    other = free_trainer(tmp_path / "other", FirstIsLast(late))
    train(other, range(1, STEPS + 1))
    assert not same(weights(other), weights(first))
    steps = [each["step"] for each in read_rollouts(tmp_path / "other") if 0 in each["positions"]]
    assert steps in ([2], [3])  # drawn by the weights 0, which are two steps old in step 3


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_schedule_of_strict_order_gives_its_run(tmp_path, ahead):
    """Prompts, seeds, losses and corrections are those of K: age and order are all that can make a difference."""
    strict = made_trainer(ahead, TransformersRollout())
    trained(strict, range(1, STEPS + 1))
    lines = [
        line(
            step,
            list(range(GROUPS * (step - 1), GROUPS * step)),
            [max(step - 1 - ahead, 0)] * GROUPS,
            rows=[row.row_id for row in strict.prompt_source.take(GROUPS * (step - 1), GROUPS)],
        )
        for step in range(1, STEPS + 1)
    ]
    (tmp_path / "strict").mkdir()
    free = free_trainer(tmp_path, oldest=ahead, schedule=str(written(tmp_path / "strict", lines)))
    train(free, range(1, STEPS + 1))
    for name, weight in weights(strict).items():
        torch.testing.assert_close(weights(free)[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("replays", [False, True])
def test_a_resumed_run_goes_on_with_the_groups_that_were_drawn(tmp_path, replays):
    """A run that is stopped has an account as whole as any, and is repeated from its schedule without a stop; one that
    replays may be stopped too."""
    (tmp_path / "whole").mkdir()
    schedule = None
    if replays:
        train(free_trainer(tmp_path / "whole"), range(1, STEPS + 1))
        schedule = str(tmp_path / "whole" / "rollouts.jsonl")
    first = free_trainer(tmp_path, schedule=schedule)
    train(first, range(1, 4))
    saved = json.loads(json.dumps(first.state_dict()))
    second = free_trainer(tmp_path, schedule=schedule)
    second.roles.actor_model.load_state_dict(first.roles.actor_model.state_dict())
    second.load_state_dict(saved)
    train(second, range(4, STEPS + 1))
    (account,) = rollout_account(read_rollouts(tmp_path))
    assert account.is_whole and account.learned == len(PROMPTS)
    (tmp_path / "again").mkdir()
    again = free_trainer(tmp_path / "again", schedule=str(tmp_path / "rollouts.jsonl"))
    train(again, range(1, STEPS + 1))
    assert same(weights(again), weights(second))


def test_a_run_that_ends_early_names_what_it_leaves(tmp_path):
    trainer = free_trainer(tmp_path)
    train(trainer, range(1, 3))
    trainer.queue.note_unused(trainer.events, "the run ended before they were used")
    (account,) = rollout_account(read_rollouts(tmp_path))
    assert account.is_whole and account.learned == 8
    assert account.left_out == {"the run ended before they were used": 8, "not drawn: the run ended first": 4}


def test_other_numbers_of_ranks_deal_groups_anew(tmp_path):
    """Of what one rank saved, two and four hold every group once, equally many each."""
    first = free_trainer(tmp_path, oldest=3)
    train(first, range(1, 2))
    saved = first.state_dict()["rollouts_ahead"]
    every = sorted([each["position"] for each in saved["drawn_of_ranks"][0]] + saved["waiting_of_ranks"][0])
    assert len(every) == 3 * GROUPS and saved["admitted"] == 4 * GROUPS
    for ranks in (2, 4):
        found = []
        for rank in range(ranks):
            trainer = made_trainer(free(3), rank=rank, ranks=ranks)
            trainer.queue.load_state_dict(saved)
            own = trainer.queue._pending()
            assert len(own) == 3 * GROUPS // ranks
            for group in trainer.queue._ended:
                assert group.rollout.prompt_of(0)[0] == group.asked.prompts[0].rows[0].flipped_prompt_ids[-1]
            found += own
        assert sorted(found) == every


def test_what_drawing_raises_ends_the_loop(tmp_path):
    trainer = free_trainer(tmp_path, FailingRollout())
    with pytest.raises(ValueError, match="no responses today"):
        next(iter(trainer.rollouts(1)))
    assert not trainer.queue._ended, "no step takes what was not drawn"


def test_without_threads_a_step_draws_by_its_own_weights(tmp_path):
    trainer = free_trainer(tmp_path, TransformersRollout())
    trainer.queue._in_background = False
    assert train(trainer, range(1, STEPS + 1)) == [0.0] * STEPS
    again = free_trainer(tmp_path, TransformersRollout(), schedule=str(tmp_path / "rollouts.jsonl"))
    again.queue._in_background = False
    train(again, range(1, STEPS + 1))
    assert same(weights(again), weights(trainer))


def test_each_rank_begins_the_groups_on_which_it_trains(tmp_path):
    """Two ranks, which hold even and odd positions; the weights 0 draw three of the even ones and one odd one."""
    lines = [line(1, [0, 1], [0, 0]), line(2, [2, 3], [0, 1]), line(3, [4, 5], [0, 1])]
    schedule = read_schedule(written(tmp_path, lines), Admission(2, 2, 3))
    assert [schedule.begun_by(0, rank, 2) for rank in range(2)] == [[0, 2, 4], [1]]
    assert [schedule.begun_by(1, rank, 2) for rank in range(2)] == [[], [3, 5]]
    assert schedule.begun_by(0, 0, 1) == [0, 1, 2, 4]


def line(step: int, positions: list[int], versions: list[int], **more) -> dict:
    return {"step": step, "prompts": 8, "positions": positions, "versions": versions, "rows": positions, **more}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], ": .* is not the schedule of a run with --rollouts_ahead free; pass"),
        ([{"step": 1, "prompts": 8, "first": 0, "rows": [0, 1]}], "is not the schedule of a run with --rollouts_ahead"),
        ([line(1, [0, 1], [0, 0])], "needs steps 1 to 2 of this run, but .* has 1 steps, up to step 1;"),
        ([line(1, [0, 1], [0, 0]), line(2, [2], [0])], "needs 2 new prompts in each step, but step 2 of .* has 1,"),
        (
            [line(1, [0, 1], [0, 0]), line(2, [1, 2], [0, 0])],
            "needs 2 new prompts in each step, but step 2 of .* or repeats earlier ones",
        ),
        (
            [line(1, [0, 1], [0, 0]), line(2, [2, 3], [1, 2])],
            "--max_rollout_age is 1, but the weights in step 2 of .* are -1 to 0 steps old",
        ),
    ],
)
def test_files_that_are_no_schedule_of_this_run(tmp_path, lines, why):
    with pytest.raises(ThreestepError, match=f"--replay_schedule.*{why}"):
        read_schedule(written(tmp_path, lines), Admission(1, 2, 2))
    lines = [line(step, [4 * step - 4 + place for place in range(4)], [0] * 4) for step in range(1, 3)]
    trainer = free_trainer(tmp_path, schedule=str(written(tmp_path, lines)), total=2)
    with pytest.raises(ThreestepError, match="--replay_schedule needs the data and the seed of the run that wrote"):
        next(iter(trainer.rollouts(1)))


def written(folder: Path, lines: list[dict]) -> Path:
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder / "rollouts.jsonl"
