"""Checkpoints on disk: whole or not there, and every damage seen."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import sha256_of_object
from training.utils.checkpoints.folder import (
    FORMAT,
    MANIFEST,
    CheckpointFolder,
    as_written,
    check_keys,
    damage,
    read_manifest,
    read_record,
    record_of,
    stranger,
)


def write(folder: CheckpointFolder, step: int) -> Path:
    folder.begin(step)
    (folder.partial(step) / "actor").mkdir()
    (folder.partial(step) / "actor" / "weights.pt").write_bytes(bytes([step]) * 1000)
    (folder.partial(step) / "trainer.json").write_text(f'{{"step": {step}}}')
    return folder.publish(step, {"settings": {"seed": 7}})


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_it_is_whole_when_it_is_published(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.steps() == [] and folder.latest_first() == []
    path = write(folder, 100)
    assert path == tmp_path / "checkpoints" / "step_000100" and damage(path) is None
    assert names(folder) == ["latest", "step_000100"]
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["settings"]) == (100, {"seed": 7})
    assert {name: entry["size_bytes"] for name, entry in manifest["files"].items()} == {
        "actor/weights.pt": 1000, "trainer.json": 13,
    }  # fmt: skip


FILES = ("actor/weights.pt", "trainer.json", MANIFEST)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "empty"])
def test_damage_in_any_file_is_seen(tmp_path, name, how):
    path = write(CheckpointFolder(tmp_path), 1)
    content = (path / name).read_bytes()
    places = range(len(content)) if how == "flipped" and name == MANIFEST else [len(content) // 2]
    for place in places:
        if how == "gone":
            (path / name).unlink()
        else:
            changed = {"cut": content[:-1], "empty": b""}.get(how)
            flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            (path / name).write_bytes(flipped if changed is None else changed)
        problem = damage(path)
        # A byte between the values of the manifest may be another blank, which says the same.
        assert (problem is not None and problem.startswith(name)) or content[place : place + 1].isspace(), place
    (path / MANIFEST).write_text('{"files": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert damage(path) == "manifest.json is damaged"


def test_a_half_written_one_is_none_and_is_cleared_away(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    folder.begin(2)
    (folder.partial(2) / "trainer.json").write_text("{")
    assert folder.steps() == [1] and [path.name for path in folder.latest_first()] == ["step_000001"]
    write(folder, 3)
    assert names(folder) == ["latest", "step_000001", "step_000003"]


def test_latest_says_where_to_begin(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        write(folder, step)
    assert [path.name for path in folder.latest_first()] == ["step_000003", "step_000002", "step_000001"]
    folder.point_to(folder.of(2))  # as resuming from a path does
    assert [path.name for path in folder.latest_first()] == ["step_000002", "step_000001"]
    (folder.path / "latest").write_text("?")
    assert len(folder.latest_first()) == 3
    (folder.path / "latest").unlink()
    assert len(folder.latest_first()) == 3


def test_older_ones_and_those_of_a_line_that_was_left_are_removed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4):
        write(folder, step)
    folder.prune(newest=3, keep_last=2)
    assert folder.steps() == [2, 3]
    folder.prune(newest=3, keep_last=0)
    assert folder.steps() == [2, 3]
    folder.prune(newest=2, keep_last=0)
    assert folder.steps() == [2]


def test_a_step_that_is_there_already_is_replaced(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = write(folder, 1)
    (path / "trainer.json").write_text("of a line that was left")
    assert damage(path) == "trainer.json does not have the size it was written with"
    assert damage(write(folder, 1)) is None
    assert names(folder) == ["latest", "step_000001"]


@pytest.mark.parametrize("name", ["stranger.pt", "actor/stranger.pt", "new/stranger.pt"])
def test_a_file_that_its_manifest_does_not_list_is_seen(tmp_path, name):
    path = write(CheckpointFolder(tmp_path), 1)
    assert stranger(path) is None
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).touch()
    assert stranger(path) == f"{name} is not in its manifest.json, so it was added later; remove it"
    assert damage(path) is None  # what was written is whole


def test_links_are_seen(tmp_path):
    path = write(CheckpointFolder(tmp_path), 1)
    shutil.move(path / "trainer.json", tmp_path)
    (path / "trainer.json").symlink_to(tmp_path / "trainer.json")  # with the right content, for now
    assert damage(path) is None
    assert stranger(path) == (
        "trainer.json is a link, but a checkpoint holds only files; replace it with its content, or remove it"
    )
    shutil.move(path / "actor", tmp_path)
    (path / "actor").symlink_to(tmp_path / "actor")
    assert str(stranger(path)).startswith("actor is a link")


def with_manifest(checkpoint: Path, **changes: Any) -> Path:
    content = {**read_manifest(checkpoint), **changes}
    content = {name: value for name, value in content.items() if name != "sha256" and value is not None}
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "sha256": sha256_of_object(content)}))
    return checkpoint


def test_one_of_a_later_version_is_named_and_not_skipped(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    path = write(folder, 2)
    assert read_manifest(path)["format"] == FORMAT == 2
    for changes, what in [
        ({"format": 3}, "in format 3"),
        ({"format": "2"}, "in format '2'"),
        ({"seal": 1}, "with seal in its manifest.json"),
    ]:
        with_manifest(path, **{"format": 2, "seal": None, **changes})
        expected = f"{path} was written {what} by a later version of Threestep, but this version reads format 2; re"
        for look in (lambda: damage(path), folder.latest_undamaged):
            with pytest.raises(ThreestepError, match=re.escape(expected)):
                look()
    with_manifest(path, format=None)
    with pytest.raises(ThreestepError, match="step_000002 was pickled by a version before 0.1; resume or export it"):
        damage(path)


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float = 0.5


def test_what_this_version_knows():
    check_keys({"before": 1, "after": 2}, ("before", "after"), "the state")
    check_keys({"before": 1}, ("before",), "the state", optional=("after",))
    check_keys({"before": 1, "after": 2}, ("before",), "the state", optional=("after",))
    assert record_of(Score, {"loss": 1.5}, "the evaluation") == Score(1.5)


REMEDY = "resume with the version of Threestep that wrote the checkpoint"


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (
            lambda _: check_keys({"z": 1, "before": 1, "a": 0}, ("before", "after"), "the state"),
            "the state contains a, z, which this version does not know",
        ),
        (
            lambda _: check_keys({"before": 1}, ("before", "b", "a"), "the state", optional=("after",)),
            "the state lacks a, b, which this version needs",
        ),
        (lambda _: check_keys([1], ("b", "a"), "the state"), "the state is not an object with a, b"),
        (
            lambda _: record_of(Score, {"loss": 1.5, "f1": 2}, "the score"),
            "the score has an unexpected form .got an unexpected keyword argument 'f1'.*",
        ),
        (
            lambda _: record_of(Score, {}, "it"),
            "it has an unexpected form .missing 1 required positional argument: 'loss'.",
        ),
        (lambda folder: read_record(folder / "none.json"), "there is no .*/none.json"),
        (lambda folder: read_record(folder / "{"), ".*/{ has an unexpected form .*"),
        (lambda folder: read_record(folder / "\xff"), ".* has an unexpected form .*"),
        (lambda folder: read_record(folder / "deep"), ".*/deep has an unexpected form .*"),
    ],
)
def test_what_this_version_does_not_know_or_cannot_read(tmp_path, read, words):
    for name, text in (("{", "{"), ("\xff", "\xff"), ("deep", "[" * 100_000)):
        (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises(ThreestepError, match=f"^--resume: {words}; {REMEDY}"):
        read(tmp_path)


def test_mistakes_in_a_record_are_named_and_other_errors_pass(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_record(tmp_path / "a.json") == {"a": [1]}
    with pytest.raises(ThreestepError, match=r"--resume: c has an unexpected form \(KeyError: 'b'\); resume"):
        with as_written("c"):
            read_record(tmp_path / "a.json")["b"]
    with pytest.raises(OSError, match="full"), as_written("c"):
        raise OSError(28, "full")  # is no matter of the record's form
