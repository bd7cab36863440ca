"""Which checkpoint a run goes on from, what is refused, and when one is due; a disk that is full while one is written.
What engines write and load is in tests/invariants/test_universal.py and tests/end_to_end/test_resume.py."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from training.utils.base.console import WHOLE_RUN_VARIABLE
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import random_state_kept
from training.utils.checkpoints import loop
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import CheckpointFolder, damage
from training.utils.checkpoints.loop import checkpointed_run
from training.utils.checkpoints.other_runs import only_run_in
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.checkpoints.plan import CheckpointPlan, plan_checkpoints
from training.utils.contracts.run import RunCourse
from training.utils.engine.ranks.startup import Ranks
from training.utils.run.run_folder import RunFolder

SETTINGS = {"learning_rate": 0.5, "seed": 7, "max_train_steps": 3}


def ranks(world_size: int = 1) -> Ranks:
    return Ranks(0, 0, world_size, torch.device("cpu"))


def plan(
    place: Path, resume: str | None = "latest", world_size: int = 1, changes: Mapping[str, Any] = {}, **flags: Any
) -> CheckpointPlan:
    settings, may_change = {**SETTINGS, **changes}, ("max_train_steps", "save_every")
    arguments, which = CheckpointArguments(resume=resume, **flags), ranks(world_size)
    return plan_checkpoints(arguments, str(place), "training.a", settings, ranks=which, may_change=may_change)


def opened(made: CheckpointPlan, place: Path, data: str = "rows", **more: Any) -> Any:
    """A run without engines. more: as `checkpointed_run` takes it"""
    return checkpointed_run(made, RunFolder(place, True), CheckpointParts({}, ranks()), data, **more)


def saved(place: Path, steps: tuple[int, ...], state: Any = None, **flags: Any) -> None:
    """A run without engines that saves after `steps`."""
    first = plan(place, resume=None, keep_last=0, **flags)
    with opened(first, place) as (metrics, kept):
        assert kept.restore() == (0, {})
        for step in steps:
            metrics.write(step, {"a": step / 2})
            kept.save(step, state or {"before": step})


def test_a_run_goes_on_after_its_latest_step(tmp_path, capsys):
    assert plan(tmp_path).resume_from is None  # nothing there yet: the run begins
    said = f"--resume: no checkpoint in {tmp_path}/checkpoints yet; starting from the beginning\n"
    assert capsys.readouterr().out == said
    saved(tmp_path, (1, 2), {"before": {"loss": 0.1 + 0.2}, "after": None})
    drawn = torch.rand(1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "a": 9.0}\n')  # by a run that was killed before its next checkpoint
    again = plan(tmp_path, changes={"max_train_steps": 9, "save_every": 4})
    with opened(again, tmp_path) as (metrics, kept):
        assert kept.restore() == (2, {"before": {"loss": 0.1 + 0.2}, "after": None})
        assert torch.equal(torch.rand(1), drawn)
        metrics.write(3, {"a": 1.5})
    said = capsys.readouterr().out
    told = [line.split(" in ")[0] for line in said.splitlines() if line.startswith("checkpoint")]
    assert told == ["checkpoint after step 1", "checkpoint after step 2"]
    assert f" s: {tmp_path}/checkpoints/step_000002\n" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["a"]) for line in lines] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert "resuming after step 2, from" in said


def test_a_damaged_one_is_passed_over_for_the_one_before(tmp_path, capsys):
    saved(tmp_path, (1, 2))
    (tmp_path / "checkpoints/step_000002/trainer.json").write_text("{}")
    found = plan(tmp_path).resume_from
    assert found == tmp_path / "checkpoints/step_000001"
    assert "warning: --resume skips step_000002" in capsys.readouterr().out
    (found / "manifest.json").unlink()
    with pytest.raises(ThreestepError, match=r"every checkpoint in .*/checkpoints is damaged \(step_000001: manifest"):
        plan(tmp_path)


@pytest.mark.parametrize("resume", ["latest", "checkpoints/step_000002"])
def test_one_with_a_file_of_somebody_else_is_refused(tmp_path, resume):
    """And is not passed over: the steps since the one before would be lost for a stray file."""
    saved(tmp_path, (1, 2))
    (tmp_path / "checkpoints/step_000002/zero_pp_rank_1_mp_rank_00_optim_states.pt").touch()
    expected = r"--resume: .*/step_000002: zero_pp_rank_1_.*\.pt is not in its manifest.json, .*; remove it$"
    with pytest.raises(ThreestepError, match=expected):
        plan(tmp_path, resume if resume == "latest" else str(tmp_path / resume))
    (tmp_path / "checkpoints/step_000002/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert plan(tmp_path).resume_from == tmp_path / "checkpoints/step_000002"


def test_one_by_its_path(tmp_path):
    saved(tmp_path, (1, 2))
    CheckpointFolder(tmp_path).point_to(tmp_path / "checkpoints/step_000002")
    assert plan(tmp_path, str(tmp_path / "checkpoints/step_000001")).resume_from == tmp_path / "checkpoints/step_000001"
    assert plan(tmp_path).resume_from == tmp_path / "checkpoints/step_000001"  # the run is that line now
    with pytest.raises(ThreestepError, match="expects a checkpoint in .* only from the run's own folder.* got /x"):
        plan(tmp_path, "/x/step_000001")
    with pytest.raises(ThreestepError, match="step_000009: there is no such folder; --resume alone uses the latest"):
        plan(tmp_path, str(tmp_path / "checkpoints/step_000009"))


def test_other_settings_are_named(tmp_path):
    saved(tmp_path, (1,))
    changes = {"learning_rate": 0.25, "seed": 8, "max_train_steps": 99, "a_new_flag": 1}
    with pytest.raises(ThreestepError) as told:
        plan(tmp_path, world_size=2, changes=changes)
    assert str(told.value) == (
        f"--resume: {tmp_path}/checkpoints/step_000001 was written with other settings: --learning_rate was 0.5 and is "
        "now 0.25; --seed was 7 and is now 8; restore them, or start over in another --output_dir"
    )
    with pytest.raises(ThreestepError, match="the data's fingerprint was rows and is now others"):  # noqa: SIM117
        with opened(plan(tmp_path), tmp_path, data="others"):
            pass


def lacking(name: str) -> Callable[[Any], Any]:
    return lambda its: {key: its[key] for key in its if key != name}


def with_more(**entries: Any) -> Callable[[Any], Any]:
    return lambda its: {**its, **entries}


NOT_WRITTEN = "trainer.json has an unexpected form .{}.*; resume with the version of Threestep that wrote"
# The file that is changed, how, and what is said.
CHANGED = [
    ("trainer", with_more(mood="good"), "trainer.json contains mood, which this version does not know"),
    ("trainer", lacking("state"), "trainer.json lacks state, which this version needs"),
    ("trainer", with_more(step="x"), NOT_WRITTEN.format("ValueError")),
    ("trainer", with_more(seconds=None), NOT_WRITTEN.format("TypeError")),
    ("trainer", with_more(log_sizes=[1]), NOT_WRITTEN.format("AttributeError")),
    ("trainer", with_more(state=[1]), NOT_WRITTEN.format("TypeError")),
    ("trainer", lambda its: [its], "trainer.json is not an object with log_sizes, seconds, state, step"),
    ("manifest", with_more(defaults=None), "manifest.json: 'defaults' is not a table; resume from"),
    ("manifest", with_more(settings=[1]), "manifest.json: 'settings' is not a table; resume from"),
    ("manifest", lacking("settings"), "manifest.json lacks settings, which this"),
    ("manifest", lacking("defaults"), "manifest.json lacks defaults, which this"),
    ("manifest", with_more(settings={}), "manifest.json lack program, ranks; resume from an earlier"),
]


@pytest.mark.parametrize(("file", "changed", "said"), CHANGED, ids=[said[:40] for *_, said in CHANGED])
def test_a_file_of_another_version_is_named(tmp_path, file, changed, said):
    saved(tmp_path, (1,))
    folder = CheckpointFolder(tmp_path)
    trainer = {**json.loads((folder.of(1) / "trainer.json").read_text()), "step": 2}
    manifest = {"settings": {**SETTINGS, "program": "training.a", "ranks": 1, "data": "rows"}, "defaults": {}}
    folder.begin(2)
    trainer = changed(trainer) if file == "trainer" else trainer
    (folder.partial(2) / "trainer.json").write_text(json.dumps(trainer))
    folder.publish(2, changed(manifest) if file == "manifest" else manifest)
    with pytest.raises(ThreestepError, match=f"--resume: .*step_000002/{said}"), opened(plan(tmp_path), tmp_path):
        pass


def test_a_model_that_is_loaded_anew_and_is_another_one_is_named(tmp_path):
    def run(content: str) -> None:
        start = {"critic_model_name_or_path": lambda: content * 20}
        resumed = plan(tmp_path, "latest" if content != "ab" else None)
        with opened(resumed, tmp_path, model_digests=start) as (_, kept):
            kept.restore()
            kept.save(1, {"before": 1})

    run("ab")
    assert plan(tmp_path).resume_from is not None
    words = "the content of --critic_model_name_or_path was abababababab and is now cdcdcdcdcdcd; restore"
    with pytest.raises(ThreestepError, match=words):
        run("cd")


def test_one_run_a_folder(tmp_path):
    with only_run_in(str(tmp_path), ranks()):  # noqa: SIM117
        with pytest.raises(ThreestepError, match="is in use by a run"):
            with only_run_in(str(tmp_path), ranks()):
                pass


@pytest.mark.parametrize(
    ("flags", "due"),
    [
        ({}, []),
        ({"save_every": 2}, [2, 4]),
        ({"save_every": 2, "save_at_end": True}, [2, 4, 5]),
        ({"save_epochs": 1.0}, [2, 3]),
        ({"save_epochs": 2.0, "save_every": 4}, [3, 4]),
    ],
)
def test_when_one_is_due(tmp_path, flags, due):
    first = plan(tmp_path, **flags)
    with opened(first, tmp_path, steps_per_epoch=1.5) as (_, kept):
        assert [step for step in range(1, 6) if kept.due(step, total_steps=5)] == due


def test_a_signal_ends_the_run_after_its_step_with_the_command_to_go_on(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end, opened(plan(tmp_path), tmp_path) as (_, kept):
        assert not kept.due(1, total_steps=5)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not kept.due(5, total_steps=5)  # it ends by itself
        assert kept.due(2, total_steps=5)
        kept.save(2, {})
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"stopped after step 2 (SIGUSR1); to resume: python -m training.a --config {tmp_path}/config.yaml --resume"
    )
    monkeypatch.setenv(WHOLE_RUN_VARIABLE, "1")
    assert kept._stop_message(2, was_saved=True) == "stopped after step 2 (SIGUSR1)"  # `threestep all` says how


class Stops(RunCourse):
    """Asks for a stop after two steps."""

    steps = 0

    def stop_reason(self) -> str | None:
        self.steps += 1
        return "the time is up" if self.steps == 2 else None


def test_a_part_of_the_course_stops_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit), opened(plan(tmp_path), tmp_path, course=[Stops()]) as (_, kept):
        assert not kept.due(1, total_steps=5)
        assert kept.due(2, total_steps=5)
        kept.save(2, {})
    assert "stopped after step 2 (the time is up); to resume: " in capsys.readouterr().out


def last_step(run: Any, losses: dict[int, float]) -> int:
    """Do a run of ten steps that is evaluated after those of `losses`; return the step after which it ends."""
    with run as (metrics, kept):
        done, _ = kept.restore()
        end = done if kept.ends(done) else 10
        for step in range(done + 1, end + 1):
            metrics.write(step, {"train/loss": float(step)})
            last = kept.ends(step)
            if step in losses:
                metrics.write(step, {"eval/loss": losses[step], "eval/accuracy": -losses[step]})
                kept.evaluated(step)
                last = last or kept.ends(step)
            if kept.due(step, step if last else 10):
                kept.save(step, {})
            if last:
                return step
        return end


class Ends(RunCourse):
    """Ends training after step 4, and adds a figure to each line."""

    judges = True
    step = 0

    def figures(self, step: int, figures: Mapping[str, float]) -> Mapping[str, float]:
        self.step = step
        return {"own/twice": 2 * step}

    def end_reason(self) -> str | None:
        return "enough" if self.step == 4 else None


def test_a_part_of_the_course_ends_training_and_adds_figures(tmp_path, capsys):
    assert last_step(opened(plan(tmp_path, resume=None), tmp_path, course=[Ends()]), {2: 1.0}) == 4
    assert "training ends after step 4: enough" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["own/twice"] for line in lines] == [2, 4, 4, 6, 8]


def full_at(monkeypatch, steps: set[int]) -> None:
    """The disk refuses checkpoints of these steps, in the run's folder."""
    publish = CheckpointFolder.publish

    def published(self: CheckpointFolder, step: int, description: Any) -> Path:
        if step in steps and "rescue" not in str(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        return publish(self, step, description)

    monkeypatch.setattr(CheckpointFolder, "publish", published)


def test_a_save_that_failed_is_tried_again_soon(tmp_path, monkeypatch, capsys):
    full_at(monkeypatch, {4, 5, 6, 7, 8})
    with opened(plan(tmp_path, resume=None, save_every=4), tmp_path) as (_, kept):
        tried = []
        for step in range(1, 14):
            if kept.due(step, 20):
                tried.append(step)
                kept.save(step, {})
    assert tried == [4, 5, 7, 8, 12]  # every 4 steps, and 1, then 2 steps after a failure; 8 would be tried again at 12
    assert CheckpointFolder(tmp_path).steps() == [12]
    assert capsys.readouterr().out.count("warning: NO CHECKPOINT") == 4


def test_a_log_that_cannot_be_flushed_costs_no_checkpoint(tmp_path, monkeypatch):
    def refused(path: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(loop, "flush_to_disk", refused)
    saved(tmp_path, (1,))
    assert CheckpointFolder(tmp_path).steps() == [1]


@pytest.mark.parametrize("takes", [True, False, None])
def test_the_checkpoint_of_a_run_that_must_end_goes_elsewhere(tmp_path, monkeypatch, capsys, takes):
    full_at(monkeypatch, {1})
    run, place = tmp_path / "run", tmp_path / "rescue"

    class Elsewhere(RunCourse):
        def other_folder(self, run: Path) -> Path:
            (place if takes else Path("/dev/null/a")).mkdir()
            return place

    course = [] if takes is None else [Elsewhere()]
    with pytest.raises(SystemExit) as end, opened(plan(run, resume=None), run, course=course) as (metrics, kept):
        metrics.write(1, {"a": 0.5})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert kept.due(1, 5)
        kept.save(1, {"before": 1})
    said = capsys.readouterr().out
    assert end.value.code == 1 and "stopped after step 1 (SIGUSR1; " in said
    if not takes:
        refused = (
            "warning: the checkpoint could not be written to another folder either (/dev/null/a: Not a directory)"
        ) in said
        assert refused == (takes is False) and "(SIGUSR1; no checkpoint was written for this step); to resume" in said
        return
    saved, target = place / "checkpoints/step_000001", run / "checkpoints" / "step_000001"
    assert f"the checkpoint is in {saved}, so first move it to {target}); to resume: " in said
    saved.rename(target)  # as it says
    with opened(plan(run), run) as (_, kept):
        assert kept.restore() == (1, {"before": 1})


@pytest.mark.parametrize("refused", ["begin", "publish", "point_to"])
def test_whatever_is_refused_leaves_the_last_good_one(tmp_path, monkeypatch, capsys, refused):
    saved(tmp_path, (1,))
    folder = CheckpointFolder(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    with opened(plan(tmp_path), tmp_path) as (_, kept):
        monkeypatch.setattr(CheckpointFolder, refused, full)
        kept.save(2, {})
        monkeypatch.undo()
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: NO CHECKPOINT")]
    assert told.startswith("warning: NO CHECKPOINT was written after step 2 (there: No space left on device); training")
    assert told.endswith(
        "with the next attempt after step 3 at the latest. The last good one is "
        f"{folder.of(1)}; free disk space, or lower --keep_last"
    )
    assert [path.name for path in folder.latest_first()] == ["step_000001"] and damage(folder.of(1)) is None
    assert not folder.partial(2).exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (with_more(dice=6), "contains dice, which this version does not know"),
        (lacking("numpy"), "lacks numpy, which this version needs"),
        (with_more(torch="zz"), "has an unexpected form .ValueError"),
        (with_more(torch="00"), "has an unexpected form .RuntimeError"),
        (with_more(python=3), "has an unexpected form .TypeError"),
    ],
)
def test_generators_of_another_form_are_named(tmp_path, changed, said):
    parts = CheckpointParts({}, ranks())
    with random_state_kept():
        assert parts.write(tmp_path) is None
        parts.load(tmp_path)
        path = tmp_path / "random_0.json"
        path.write_text(json.dumps(changed(json.loads(path.read_text()))))
        with pytest.raises(ThreestepError, match=f"--resume: {path} {said}.*; resume with the version of Threestep"):
            parts.load(tmp_path)
