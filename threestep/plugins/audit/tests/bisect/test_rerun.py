"""Runs taken up again: from which checkpoint, with which settings, and what ends them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from threestep.plugins.audit.bisect import rerun as module
from threestep.plugins.audit.bisect.bisect import bisect
from threestep.plugins.audit.bisect.digest_files import RunDigests
from threestep.plugins.audit.bisect.page import page
from threestep.plugins.audit.bisect.rerun import checkpoint_before, rerun, starter
from threestep.plugins.audit.bisect.text import advice, as_json, as_lines, notes
from threestep.plugins.audit.recording.files import RecordHead, StepRecord, write_record
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit

SETTINGS = {"output_dir": "runs/x", "push_to_hub": True, "hub_model_id": "a/b", "learning_rate": 0.1, "save_every": 2}


def run_in(folder: Path, rows: str = "r") -> RunDigests:
    hashes = {"rows": rows, "random": "s"}
    steps = {(step, 0): {"step": step, "hashes": hashes, "floats": {}, "figures": {}} for step in (1, 2, 3)}
    begin = {"digests": 1, "begins_after": 0, "program": "training.x", "ranks": 2, "weights": {}}
    folder.mkdir(parents=True, exist_ok=True)
    return RunDigests(folder, begin, ({**begin, "begins_after": 2, "ranks": 1},), steps, SETTINGS, {})


@dataclass
class Started:
    """Programs that write the line and the record of a step, and end with a code."""

    run: RunDigests
    writes: bool = True
    words: list[str] = field(default_factory=list)
    ranks: int = 0
    stopped: int = 0
    row: int = 1
    environment: dict[str, Any] = field(default_factory=dict)

    def __call__(self, words: Any, ranks: int, output: Path) -> Started:
        self.words, self.ranks = list(words), ranks
        output.write_text("loading\nerror: no disk\n")
        config = yaml.safe_load(Path(words[2]).read_text())
        folder, [step] = Path(config["output_dir"]), config["record_steps"]
        if self.writes:
            tensors = {name: module_array([self.row]) for name in ("rows", "token_ids")}
            tensors["lengths"] = module_array([1])
            write_record(folder / "records" / f"step_{step:06}", StepRecord(RecordHead("sft", step), [tensors]))
            (folder / "environment.json").write_text(json.dumps(self.environment))
            (folder / "digests.jsonl").write_text(json.dumps(self.run.steps[step, 0]) + "\n")
        return self

    def poll(self) -> int | None:
        return 0

    def stop(self) -> None:
        self.stopped += 1


def module_array(values: list[int]) -> Any:
    import numpy

    return numpy.array(values)


def with_settings(run: RunDigests) -> RunDigests:
    return RunDigests(run.folder, run.begin, run.resumed, run.steps, {**SETTINGS, "record_steps": []}, {})


def test_it_begins_at_the_checkpoint_before(tmp_path: Path):
    run = with_settings(run_in(tmp_path / "a"))
    for step in (1, 2, 3):
        place = run.folder / "checkpoints" / f"step_{step:06}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
    (run.folder / "checkpoints" / "step_000002.partial").mkdir()
    assert [checkpoint_before(run, step) for step in (1, 2, 3, 9)] == [0, 1, 2, 3]
    start = Started(run)
    found = rerun(run, (3, 0), tmp_path / "work" / "a", start)
    assert found.began == 2 and found.folder == tmp_path / "work" / "a" / "records" / "step_000003"
    assert start.words[0] == "training.x" and start.words[-1] == "--resume" and start.ranks == 1 and start.stopped == 1
    assert (tmp_path / "work" / "a" / "checkpoints" / "step_000002" / "manifest.json").is_file()
    config = yaml.safe_load((tmp_path / "work" / "a.yaml").read_text())
    assert config == {
        "output_dir": str(tmp_path / "work" / "a"), "push_to_hub": False, "hub_model_id": None, "learning_rate": 0.1,
        "save_every": 0, "record_steps": [3],
    }  # fmt: skip


def test_it_begins_at_the_start_without_one(tmp_path: Path):
    run = with_settings(run_in(tmp_path / "a"))
    start = Started(run)
    found = rerun(run, (1, 0), tmp_path / "work" / "a", start)
    assert found.began == 0 and start.words[-1].endswith("a.yaml") and start.ranks == 2


def test_a_program_that_ends_before_the_step_is_named(tmp_path: Path):
    run = with_settings(run_in(tmp_path / "a"))
    start = Started(run, writes=False)
    with pytest.raises(ThreestepError, match="ended before step 3; the last line it printed was: .*error: no"):
        rerun(run, (3, 0), tmp_path / "work" / "a", start)
    assert start.stopped == 1


def test_two_runs_are_bisected_and_written_down(tmp_path: Path):
    a, b = (with_settings(run_in(tmp_path / name, rows)) for name, rows in (("a", "x"), ("b", "y")))
    found = bisect(a, b, tmp_path / "work", [Started(a), Started(b, row=2)])
    lines = as_lines(a, b, found)
    verdict, *following = lines[-3:]
    assert verdict.startswith("the first difference is in step 1, data: rows, row 1 (rank 0): row 1 (rank 0) and row 2")
    assert following[0].startswith("next: the data differ, not the model") and "`threestep inspect`" in following[0]
    assert f"`threestep audit {tmp_path}/work/b/records/step_000001` check each" in following[1]
    assert as_json(a, b, found)["next"] == [each.removeprefix("next: ") for each in following]
    assert as_json(a, b, found)["located"][0]["name"] == "rows"
    assert "row 2 (rank 0)" in page(a, b, found) and "warning verdict wrong" in page(a, b, found)
    assert f"<code>threestep audit {tmp_path}/work/b/records/step_000001</code> check each" in page(a, b, found)


def test_a_run_that_does_not_repeat_itself_is_a_note(tmp_path: Path):
    a, b = (with_settings(run_in(tmp_path / name, rows)) for name, rows in (("a", "x"), ("b", "y")))
    found = bisect(a, b, tmp_path / "work", [Started(b), Started(b)])
    assert len(found.notes) == 1 and "does not reproduce step 1 (rows)" in found.notes[0]
    assert found.notes[0].endswith(
        ": its code (pass a checkout with --code_a) or its machine differs, or some of its operations are not "
        "deterministic"
    )
    assert advice(found)[0].startswith("first make both runs reproducible")
    assert found.located == [] and "the two records of this step are equal" in "\n".join(as_lines(a, b, found))


def test_what_a_run_ran_with_is_in_the_note(tmp_path: Path):
    a, b = (with_settings(run_in(tmp_path / name, rows)) for name, rows in (("a", "x"), ("b", "y")))
    then = {"device": "1 rank on cpu, 1 thread", "commit": "aa", "versions": {"transformers": "5.24.0"}}
    now = {"device": "1 rank on cpu, 2 threads", "commit": "bb", "versions": {"transformers": "5.19.0"}}
    start = Started(b, environment=now)
    found = bisect(replace(a, environment=then), b, tmp_path / "work", [start, Started(b)])
    assert found.notes[0].endswith(
        "it ran with cpu, 1 thread, now cpu, 2 threads, transformers 5.24.0, now 5.19.0, commit aa, now bb; pass "
        "a checkout with --code_a and pass an interpreter with --python_a"
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("hashes", "random"), "compare the seeds"),
        (("floats", "train/loss"), "compare the code of the forward pass"),
        (("figures", "train/grad_norm"), "exchange between ranks"),
        (("figures", "train/learning_rate"), "the learning rate schedule"),
        (("hashes", "rollout/samples"), "how responses are drawn"),
    ],
)
def test_each_part_has_its_advice(tmp_path: Path, path, words):
    a, b = (run_in(tmp_path / name) for name in "ab")
    group, name = path
    for run, value in ((a, 1.0), (b, 2.0)):
        line = {**run.steps[1, 0], group: {**run.steps[1, 0][group], name: [value] if group == "floats" else value}}
        run.steps[1, 0] = line  # type: ignore[index]
    assert words in advice(bisect(a, b, None, []))[0]
    other = replace(b, settings={**SETTINGS, "beta": 1})
    assert advice(bisect(a, other, None, []))[0].startswith("give one run the other's flags")
    assert advice(bisect(a, a, None, [])) == []


def test_generators_that_part_are_a_note(tmp_path: Path):
    a, b = (run_in(tmp_path / name) for name in "ab")
    for step in (2, 3):
        b.steps[step, 0]["hashes"] = {"rows": "r", "random": "other"}  # type: ignore[index]
    b.steps[1, 0]["floats"] = {"loss": [1.0]}  # type: ignore[index]
    a.steps[1, 0]["floats"] = {"loss": [2.0]}  # type: ignore[index]
    [note] = notes(a, b, bisect(a, b, None, []))
    assert "are equal before step 1 and differ after it: one run draws more random numbers" in note
    b.steps[1, 0]["hashes"] = {"rows": "other", "random": "other"}  # type: ignore[index]
    assert notes(a, b, bisect(a, b, None, [])) == []  # the states are the first difference
    versions = [replace(run, environment={"versions": {"torch": name}}) for run, name in ((a, "1"), (b, "2"))]
    [note] = notes(*versions, bisect(*versions, None, []))
    assert note.startswith("the states of the random generators differ before step 1: dropout")


def test_digests_alone_run_nothing(tmp_path: Path):
    a, b = (with_settings(run_in(tmp_path / name, rows)) for name, rows in (("a", "x"), ("b", "y")))
    found = bisect(a, b, None, [])
    *_, verdict, _, following = as_lines(a, b, found)
    assert found.located is None and verdict == "the first difference is in step 1: data: rows: x and y"
    assert following.startswith("next: --trust_run reruns both up to this step, with their own settings and code")
    equal = bisect(a, a, tmp_path, [])
    assert as_lines(a, a, equal)[-1] == "no difference: every number of every step is equal, bit for bit"


def test_a_step_without_a_record_is_a_mistake(tmp_path: Path, monkeypatch):
    a, b = (with_settings(run_in(tmp_path / name, rows)) for name, rows in (("a", "x"), ("b", "y")))
    starts = [Started(a), Started(b)]
    original = module._awaited

    def without(running: Any, path: Path, key: Any) -> Any:
        for file in path.parent.glob("records/*/record.json"):
            file.unlink()
        return original(running, path, key)

    monkeypatch.setattr(module, "_awaited", without)
    with pytest.raises(ThreestepError, match="has no record of the step, because"):
        bisect(a, b, tmp_path / "work", starts)


def test_an_interpreter_without_the_project_is_named(tmp_path: Path):
    with pytest.raises(ThreestepError, match=r"--python_a and --python_b expect an interpreter, got .*nothing_there"):
        starter(str(tmp_path / "nothing_there"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ThreestepError, match="expect an interpreter with threestep installed"):
        starter(str(bare))


def test_a_folder_without_the_project_is_named(tmp_path: Path):
    with pytest.raises(ThreestepError, match="--code_a and --code_b expect a threestep checkout, but .*git"):
        starter(None, str(tmp_path))


def test_a_checkout_is_run_with_as_many_threads(tmp_path: Path):
    package = tmp_path / "training"
    package.mkdir()
    (package / "__main__.py").write_text("import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.argv[2])\n")
    running = starter(sys.executable, str(tmp_path), 3)(["training.x"], 1, tmp_path / "out.log")
    running.process.wait(60)  # type: ignore[attr-defined]
    assert (tmp_path / "out.log").read_text() == "3 training.x\n"


def test_a_program_is_started_and_ended(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -c ] && echo /there && exit\nexec {sys.executable} -c 'print(1)'\n")
    python.chmod(0o755)
    running = starter(str(python))(["training.x"], 1, tmp_path / "out.log")
    running.process.wait(60)  # type: ignore[attr-defined]
    assert running.poll() == 0
    running.stop()
    assert (tmp_path / "out.log").read_text() == "1\n"
