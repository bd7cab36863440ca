"""A run that is judged by its evaluations: what is kept and loaded, when it ends, and how it resumes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.utils.checkpoints.test_loop import last_step, opened, plan
from threestep.plugins.best_model.arguments import BestModelArguments
from threestep.plugins.best_model.best import open_course
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import sha256_of_object
from training.utils.checkpoints.folder import CheckpointFolder

OWN = BestModelArguments.__dataclass_fields__.keys()


def run_in(place: Path, resume: str | None = None, **flags: Any) -> Any:
    """A run with a course. flags: of checkpoints, and the plugin's."""
    own = BestModelArguments(**{name: flags.pop(name) for name in OWN & flags.keys()})
    course = open_course(vars(own))
    return opened(plan(place, resume=resume, **flags), place, course=[] if course is None else [course])


def judged(place: Path, losses: dict[int, float], last: int, resume: str | None = None, **flags: Any) -> Any:
    """A run that is evaluated after the steps of `losses`, and ends after `last`. Returns the loaded state."""
    with run_in(place, resume, load_best_model_at_end=True, **flags) as (metrics, kept):
        done, _ = kept.restore()
        for step in range(done, last + 1):
            if step in losses:
                metrics.write(step, {"eval/loss": losses[step], "eval/accuracy": -losses[step]})
                kept.evaluated(step)
            if step and kept.due(step, total_steps=10):
                kept.save(step, {"at": step})
        return kept.load_final(last)


def checkpoints_in(place: Path) -> list[int]:
    return CheckpointFolder(place).steps()


def test_the_best_evaluation_is_kept_and_loaded_at_the_end(tmp_path, capsys):
    """Before training counts for nothing, and what is best at the end needs no checkpoint."""
    losses = {0: 0.1, 2: 3.0, 4: 1.0, 6: 2.0, 8: float("nan"), 10: 1.5}
    assert judged(tmp_path / "a", losses, 10, save_every=3, keep_last=1) == {"at": 4}
    assert checkpoints_in(tmp_path / "a") == [4, 9]
    said = capsys.readouterr().out
    assert "the model is the best by its evaluations, eval/loss 1 after step 4; loading its weights from" in said
    assert judged(tmp_path / "b", {**losses, 10: 0.5}, 10, keep_last=1) is None
    assert judged(tmp_path / "c", losses, 10, metric_for_best_model="accuracy") == {"at": 4}
    assert judged(tmp_path / "d", losses, 10, metric_for_best_model="eval_loss", greater_is_better=True) == {"at": 2}
    assert judged(tmp_path / "e", {10: 1.0}, 10) is None
    assert "had only one evaluation to choose from" in capsys.readouterr().out


def test_a_resumed_run_remembers_the_best(tmp_path):
    losses = {2: 1.0, 6: 2.0, 10: 3.0}
    judged(tmp_path, losses, 7, save_every=5)
    assert judged(tmp_path, losses, 10, resume="latest", save_every=5) == {"at": 2}


def ended(place: Path, losses: dict[int, float], resume: str | None = None, **flags: Any) -> int:
    return last_step(run_in(place, resume, **flags), losses)


LOSSES = {1: 3.0, 2: 1.0, 4: 2.0, 5: float("nan"), 6: 1.0, 7: 0.5, 8: 4.0}


def test_evaluations_without_a_better_one_end_the_run(tmp_path, capsys):
    assert ended(tmp_path / "a", LOSSES, early_stopping=3) == 6
    line = "training ends after step 6: none better than eval/loss 1 after step 2 in 3 evaluations (--early_stopping 3)"
    assert line in capsys.readouterr().out
    assert ended(tmp_path / "b", LOSSES, early_stopping=4) == 10
    assert ended(tmp_path / "c", LOSSES, early_stopping=1, metric_for_best_model="accuracy") == 4
    assert ended(tmp_path / "d", LOSSES, early_stopping=1, greater_is_better=True) == 2
    assert ended(tmp_path / "e", {1: float("nan"), 2: float("nan")}, early_stopping=2) == 2
    assert "training ends after step 2: no finite value in 2 evaluations" in capsys.readouterr().out
    assert ended(tmp_path / "f", LOSSES) == 10


def test_a_resumed_run_ends_where_the_unbroken_one_does(tmp_path):
    for step in range(1, 6):
        place, first = tmp_path / str(step), {at: loss for at, loss in LOSSES.items() if at <= step}
        assert ended(place, first, early_stopping=3, save_every=step, keep_last=0) == 10
        for later in checkpoints_in(place):
            if later > step:
                shutil.rmtree(CheckpointFolder(place).of(later))
        assert ended(place, LOSSES, resume="latest", early_stopping=3, save_at_end=True, keep_last=0) == 6
        assert ended(place, LOSSES, resume="latest", early_stopping=3) == 6  # it is over
        assert ended(place, LOSSES, resume="latest", early_stopping=4) == 10  # and is prolonged


def test_a_best_checkpoint_that_is_gone_leaves_the_last_weights(tmp_path, capsys):
    with run_in(tmp_path, load_best_model_at_end=True) as (metrics, kept):
        metrics.write(1, {"eval/loss": 1.0})
        kept.evaluated(1)
        kept.save(1, {})
        shutil.rmtree(CheckpointFolder(tmp_path).of(1))
        assert kept.load_final(2) is None
    assert "warning: the model is from step 2" in capsys.readouterr().out


def test_a_metric_that_no_evaluation_has(tmp_path):
    with pytest.raises(ThreestepError, match="expects one of accuracy, loss, got 'acuracy'; did you mean 'accuracy'"):
        judged(tmp_path / "a", {0: 1.0}, 0, metric_for_best_model="acuracy")
    for flag in ({"load_best_model_at_end": True}, {"early_stopping": 1}):
        words = f"^--{next(iter(flag))} needs evaluations, but there are no evaluation rows"
        with run_in(tmp_path / "b", **flag) as (_, kept), pytest.raises(ThreestepError, match=words):
            kept.evaluated(0)


def test_a_checkpoint_of_version_0_1_resumes_with_what_it_knew(tmp_path):
    """It had the best and the end by evaluations under names of their own."""
    judged(tmp_path, {2: 1.0, 6: 2.0}, 7, save_every=5, early_stopping=3)
    folder = CheckpointFolder(tmp_path).of(5)
    trainer = json.loads((folder / "trainer.json").read_text())
    course = trainer.pop("course")
    course["early_end"]["called"] = False
    content = json.dumps({**trainer, **course})
    (folder / "trainer.json").write_text(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    digest = hashlib.sha256(content.encode()).hexdigest()
    manifest["files"]["trainer.json"] = {"size_bytes": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": sha256_of_object(manifest)}))
    assert judged(tmp_path, {6: 2.0, 10: 3.0}, 10, resume="latest", save_every=5, early_stopping=3) == {"at": 2}
