"""What lies in an output folder and would end a run is refused in a sentence before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.run.run_folder import check_place, make_output_dir
from training.utils.run.trackers import WRITTEN

FOLDERS = ("model", "critic", "checkpoints", "tensorboard", "sample_pictures")
FILES = (
    "metrics.jsonl", "samples.jsonl", "bad_steps.jsonl", "config.yaml", "summary.json", "a_plugins.html", ".running",
    "checkpoints/latest", "tracker_runs.json",
)  # fmt: skip


def contents(place: Path) -> dict[str, str]:
    return {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [*FOLDERS, *FILES, "checkpoints/step_000100"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "wrong kind", "pipe"])
def test_nothing_is_followed_or_overwritten(tmp_path, name, kind):
    run, outside = tmp_path / "run", tmp_path / "outside"
    is_folder = name in FOLDERS or "step_" in name
    path = run / name
    path.parent.mkdir(parents=True)
    if kind == "link":
        target = outside if is_folder else outside / "file"
        outside.mkdir()
        (outside / "file").write_text("theirs")
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    elif is_folder:
        path.write_text("theirs")
    else:
        path.mkdir()
    before = contents(tmp_path) if kind != "pipe" else {}
    expected = "a folder" if is_folder else "a file"
    got = {"link": "a link to ", "dangling link": "a link to .*, which is not there", "pipe": "neither file nor folder"}
    kind_got = got.get(kind, "a file" if is_folder else "a folder")
    with pytest.raises(
        ThreestepError, match=f"--output_dir expects {expected} of the run's own at {path}.* {kind_got}"
    ):
        make_output_dir(run, (*WRITTEN, "a_plugins.html"))
    assert kind == "pipe" or contents(tmp_path) == before


def test_all_of_it_is_said_at_once(tmp_path):
    (tmp_path / "model").write_text("a")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ThreestepError, match="2 mistakes") as told:
        make_output_dir(tmp_path)
    assert "/model" in str(told.value) and "/metrics.jsonl" in str(told.value)


@pytest.mark.parametrize("kind", ["a file", "a link to .*, which is not there"])
def test_the_folder_itself(tmp_path, kind):
    run = tmp_path / "run"
    run.write_text("a") if kind == "a file" else run.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ThreestepError, match=f"--output_dir expects a folder, got {run}, which is {kind}; remove it"):
        make_output_dir(run)


def test_a_link_to_the_folder_is_fine(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    make_output_dir(tmp_path / "run")
    make_output_dir(tmp_path / "run" / "a" / "b")
    assert (tmp_path / "scratch" / "a" / "b").is_dir()


def test_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ThreestepError, match="--output_dir .* cannot be written to .Not a directory"):
        make_output_dir(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["", "checkpoints", "model", "metrics.jsonl"])
def test_without_permission(tmp_path, name):
    """As another user: the superuser may write everywhere."""
    path = tmp_path / name
    if name == "metrics.jsonl":
        path.touch()
    else:
        path.mkdir(exist_ok=True)
    path.chmod(0o555)
    words = (
        "import os, sys; from pathlib import Path; from training.utils.run import run_folder\n"
        "if os.getuid() == 0: run_folder.os.access = lambda path, mode: os.stat(path).st_mode & 0o222 > 0\n"
        "run_folder.make_output_dir(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", words, str(tmp_path)], capture_output=True, text=True)
    path.chmod(0o755)
    assert f"{path} cannot be written to (Permission denied)" in done.stderr, done.stderr


def test_a_mounted_model(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "model")
    with pytest.raises(
        ThreestepError, match="/model is a mounted file system, and a run replaces its model by a rename"
    ):
        make_output_dir(tmp_path)


@pytest.mark.parametrize(
    "place, is_folder, sentence",
    [
        ("theirs", True, "^--out expects a folder, got '.*theirs', which is a file; name another$"),
        ("here", False, "^--out expects a file, got '.*here', which is a folder; name another$"),
        ("theirs/a", True, "^--out '.*/a' cannot be written: .*theirs: a file is in its way; name another place$"),
        ("theirs/a/b", False, "^--out '.*/b' cannot be written: .*theirs/a: Not a directory; name another place$"),
    ],
)
def test_a_place_that_takes_no_work_is_refused_before_it(tmp_path, place, is_folder, sentence):
    (tmp_path / "here").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    with pytest.raises(ThreestepError, match=sentence):
        check_place("--out", tmp_path / place, is_folder)
    assert contents(tmp_path) == {"theirs": "theirs"}


def test_the_folders_above_a_place_are_made(tmp_path):
    check_place("--out", tmp_path / "new" / "below" / "page.html")
    assert (tmp_path / "new" / "below").is_dir() and not (tmp_path / "new" / "below" / "page.html").exists()
    check_place("--out", tmp_path / "new", is_folder=True)
