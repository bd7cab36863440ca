"""What a run leaves behind, and what lies in an output folder and would end it: refused in a sentence before it begins.
Lines that a disk refuses wait, and come whole and in their order."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.mistakes import mistakes_of
from tests.support.small_disk import largest_file
from training.utils.base.errors import ThreestepError
from training.utils.run import run_folder
from training.utils.run.run_arguments import FaultArguments, RunArguments
from training.utils.run.run_folder import RunFolder, RunLog, check_place, make_output_dir
from training.utils.run.trackers import WRITTEN


def test_settings_and_summary(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b", is_main_rank=True)
    folder.write_config({"seed": 1, "data_path": ["x"], "limit": None, "text": "größer"}, "A run of 2 ranks.")
    folder.write_json("summary.json", {"loss": 0.5})
    folder.write_json("summary.json", {"loss": 0.25})
    assert (folder.path / "config.yaml").read_text(encoding="utf-8").startswith("# A run of 2 ranks.\n")
    assert yaml.safe_load((folder.path / "config.yaml").read_text(encoding="utf-8")) == {
        "seed": 1, "data_path": ["x"], "limit": None, "text": "größer"
    }  # fmt: skip
    assert json.loads((folder.path / "summary.json").read_text()) == {"loss": 0.25}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "summary.json"]
    assert folder.model == tmp_path / "a" / "b" / "model"
    other = RunFolder(tmp_path / "out", is_main_rank=False)
    other.write_config({}, "")
    other.write_json("summary.json", {})
    other.cut_logs({})
    other.append_samples([{}])
    assert not (tmp_path / "out").exists()


def test_logs_are_appended_cut_back_and_begun_anew(tmp_path):
    folder = RunFolder(tmp_path, is_main_rank=True)
    folder.append_samples([{"prompt": "größer\n", "reward": 1.0}])
    sizes = folder.log_sizes()
    assert sizes == {"samples.jsonl": (tmp_path / "samples.jsonl").stat().st_size}
    folder.append_samples([{"prompt": "b"}, {"prompt": "c"}])
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["größer\n", "b", "c"]
    assert "größer" in lines[0]
    (tmp_path / "metrics.jsonl").write_text("begun after the sizes were taken")
    folder.cut_logs(sizes)
    folder.cut_logs({"samples.jsonl": 10**6})  # one that is shorter stays as it is
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines() == lines[:1]
    assert not (tmp_path / "metrics.jsonl").exists()
    folder.cut_logs({})
    assert folder.log_sizes() == {}


@pytest.mark.parametrize("takes_bytes", [0, 1, 5])
def test_lines_wait_until_the_disk_takes_them(tmp_path, capsys, takes_bytes):
    lines = RunLog(tmp_path / "metrics.jsonl")
    lines.append(["first"])
    with largest_file(len("first\n") + takes_bytes):
        for number in range(3):
            lines.append([f"line {number}"])
    assert lines.path.read_bytes().startswith(b"first\n")
    lines.append(["last", "ü", "a\ud83d"])  # and half a surrogate pair
    assert lines.path.read_text().splitlines() == ["first", "line 0", "line 1", "line 2", "last", "ü", "a?"]
    lines.settle()
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {lines.path} cannot be written (File too large); its lines stay in memory, and training continues",
        f"{lines.path} is complete: the lines that could not be written earlier have been added",
    ]
    lines.path.unlink()
    lines.append(["b"])
    assert lines.path.read_text() == "b\n"  # a file that was removed is made again


def test_the_oldest_lines_are_given_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_folder, "_MOST_WAITING_BYTES", 10)
    lines = RunLog(tmp_path / "samples.jsonl")
    with largest_file(0):
        for letter in "abcd":
            lines.append([3 * letter])
    lines.settle()
    assert lines.path.read_text().splitlines() == ["ccc", "ddd"]
    assert "warning: 2 lines of" in capsys.readouterr().out
    lost = RunLog(tmp_path / "metrics.jsonl")
    with largest_file(0):
        lost.append(["a", "b"])
        lost.settle()
    said = f"warning: 2 lines of {lost.path} are lost (File too large)"
    assert capsys.readouterr().out.splitlines()[-1] == said


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
    got = {
        "link": "a link to ",
        "dangling link": "a link to .*, which does not exist",
        "pipe": "neither a file nor a folder",
    }
    kind_got = got.get(kind, "a file" if is_folder else "a folder")
    with pytest.raises(ThreestepError, match=f"--output_dir expects {expected} of this run at {path}.* {kind_got}"):
        make_output_dir(run, (*WRITTEN, "a_plugins.html"))
    assert kind == "pipe" or contents(tmp_path) == before


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("both", "2 mistakes.*\n.*/model.*\n.*/metrics.jsonl"),  # all of it is said at once
        ("file", "--output_dir expects a folder, got .*/file, which is a file; remove it"),
        (
            "dangling",
            "--output_dir expects a folder, got .*/dangling, which is a link to .*, which does not exist",
        ),
        ("file/run", "--output_dir .* cannot be written to .Not a directory"),
    ],
)
def test_what_is_no_folder_for_a_run(tmp_path, place, words):
    (tmp_path / "both" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "both" / "model").write_text("a")
    (tmp_path / "file").write_text("a")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ThreestepError, match=words):
        make_output_dir(tmp_path / place)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "new").mkdir()
    make_output_dir(tmp_path / "link" / "a" / "b")  # a link to a folder is fine
    assert (tmp_path / "new" / "a" / "b").is_dir()


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
        ThreestepError, match="/model is a mounted file system, but a run replaces its model by renaming"
    ):
        make_output_dir(tmp_path)


@pytest.mark.parametrize(
    "place, is_folder, sentence",
    [
        ("theirs", True, "^--out expects a folder, got '.*theirs', which is a file; choose another$"),
        ("here", False, "^--out expects a file, got '.*here', which is a folder; choose another$"),
        ("theirs/a", True, "^--out '.*/a' cannot be written: .*theirs: a file is in the way; choose another place$"),
        ("theirs/a/b", False, "^--out '.*/b' cannot be written: .*theirs/a: Not a directory; choose another place$"),
    ],
)
def test_a_place_that_takes_no_work_is_refused_before_it(tmp_path, place, is_folder, sentence):
    (tmp_path / "here").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    with pytest.raises(ThreestepError, match=sentence):
        check_place("--out", tmp_path / place, is_folder)
    assert contents(tmp_path) == {"theirs": "theirs"}
    check_place("--out", tmp_path / "new" / "below" / "page.html")  # the folders above it are made
    assert (tmp_path / "new" / "below").is_dir() and not (tmp_path / "new" / "below" / "page.html").exists()
    check_place("--out", tmp_path / "new", is_folder=True)


NO_NAME = "--run_name expects a valid folder name, got '{}'; choose another, or set --output_dir"


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        (RunArguments(), []),
        (RunArguments(seed=-1), ["--seed expects 0 or more, got -1"]),
        *((RunArguments(run_name=name), [NO_NAME.format(name)]) for name in ("..", "a/b", " ")),
        (FaultArguments(), []),
        (FaultArguments(max_bad_steps=0), ["--max_bad_steps expects 1 or more, got 0"]),
        (FaultArguments(rank_timeout=0.0), ["--rank_timeout expects more than 0 and less than 1e+08, got 0.0"]),
        (FaultArguments(rank_timeout=math.nan), ["--rank_timeout expects more than 0 and less than 1e+08, got nan"]),
    ],
)
def test_mistakes_in_flags(flags, sentences):
    assert mistakes_of(flags) == sentences


def test_a_run_with_a_name_and_no_folder_is_in_a_folder_of_its_name():
    """And has one default seed: DeepSpeed-Chat's step 3 had none, and drew its prompts from another split."""
    assert RunArguments(run_name="mine").output_dir == "runs/mine" and RunArguments().seed == 1234
    assert RunArguments(run_name="mine", output_dir="out").output_dir == "out"
