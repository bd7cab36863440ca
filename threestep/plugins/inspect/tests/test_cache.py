"""list, verify and prune: what a folder holds, what is broken, what may go, and what may not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from threestep.plugins.inspect.cache import main
from training.utils.base import storage
from training.utils.base.console import counted
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import TextBlock
from training.utils.data.cache import cache
from training.utils.data.cache.cache import open_or_build
from training.utils.data.cache.shards import SplitPlan, build_shards
from training.utils.data.rows.dataset import write_rows

DAY_SECONDS = 86400


@pytest.fixture
def folder(tmp_path):
    """Three builds of 1, 2 and 3 rows (some 700 bytes each and their manifests), last used 30, 20 and 10 days ago."""
    for rows in (1, 2, 3):
        path = Path(make(tmp_path, rows).path)
        age(path, 40 - 10 * rows)
    (tmp_path / "notes").mkdir()  # not ours, never touched
    (tmp_path / "file_digests.json").write_text("{}")
    return tmp_path


def make(folder, rows):
    def build(where):
        texts = (TextBlock(row, np.arange(5, dtype=np.int32)) for row in range(rows))
        return {"splits": {"train": asdict(write_rows(os.path.join(where, "train.arrow"), TextBlock, texts))}}

    return open_or_build(
        str(folder), "phase1", {"datasets": f'["{rows}"]'}, build, rebuild=False, log=lambda line: None
    )


def age(path, days):
    for each in path.rglob("*"):
        os.utime(each, (time.time() - days * DAY_SECONDS,) * 2)


def run(capsys, *words):
    main([words[0], "--data_output_path", str(words[1]), *map(str, words[2:])])
    return capsys.readouterr().out.splitlines()


def rows_left(folder):
    manifests = [cache.read_manifest(str(path)) for path in folder.glob("phase1-*") if path.is_dir()]
    return sorted(manifest["splits"]["train"]["rows"] for manifest in manifests)


def test_list_has_the_last_used_first(folder, capsys):
    lines = run(capsys, "list", folder)
    assert len(lines) == 4 and lines[3].startswith(f"3 in {folder}, ")
    for line, rows in zip(lines, (3, 2, 1), strict=False):
        assert f"train: {counted(rows, 'row')}, {5 * rows} tokens" in line and f'of ["{rows}"]' in line
        assert f"used {40 - 10 * rows}.0 days ago" in line
    make(folder, 1)  # opened, and so used
    assert "train: 1 row," in run(capsys, "list", folder)[0]


def test_verify_reads_every_byte(folder, capsys):
    assert [line.endswith("  sound") for line in run(capsys, "verify", folder)] == [True] * 3
    path = Path(make(folder, 2).splits["train"].path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        run(capsys, "verify", folder)
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and lines[-1].startswith("1 of 3 builds are damaged: run with --rebuild_cache")
    assert sum("train.arrow does not match the checksum in its manifest" in line for line in lines) == 1
    assert sum(line.endswith("  sound") for line in lines) == 2


@pytest.mark.parametrize(
    ("harm", "fragment"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected"),
        (os.remove, "train.arrow does not open (No such file or directory)"),
    ],
    ids=["cut", "removed"],
)
def test_verify_says_what_is_wrong(folder, capsys, harm, fragment):
    harm(next(folder.glob("phase1-*/train.arrow")))
    with pytest.raises(SystemExit):
        run(capsys, "verify", folder)
    assert fragment in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "stay"),
    [
        (["--keep_newest", 2], [2, 3]),
        (["--keep_newest", 0], []),
        (["--keep_newest", 5], [1, 2, 3]),
        (["--older_than_days", 15], [3]),
        (["--older_than_days", 50], [1, 2, 3]),
        (["--max_gigabytes", 0], []),
        (["--max_gigabytes", 1], [1, 2, 3]),
        (["--max_gigabytes", 4e-6], [2, 3]),  # some 1.9 kB each
        (["--keep_newest", 2, "--older_than_days", 15], [3]),
    ],
)
def test_prune_removes_what_was_not_used_for_longest(folder, capsys, limits, stay):
    lines = run(capsys, "prune", folder, *limits)
    assert rows_left(folder) == stay
    assert sum(line.startswith("removed phase1-") for line in lines) == 3 - len(stay)
    assert lines[-1].startswith("freed ") and f"left in {folder}" in lines[-1]
    assert len(list(folder.glob("phase1-*.lock"))) == len(stay)  # no lock outlives its folder
    assert (folder / "notes").is_dir() and (folder / "file_digests.json").is_file()


def test_prune_keeps_what_is_in_use(folder, capsys):
    opened = make(folder, 2)
    lines = run(capsys, "prune", folder, "--keep_newest", 0)
    assert sum(line.endswith(": in use") and line.startswith("kept ") for line in lines) == 1
    assert rows_left(folder) == [2] and list(opened.splits["train"][1].input_ids) == [0, 1, 2, 3, 4]
    del opened
    run(capsys, "prune", folder, "--keep_newest", 0)
    assert rows_left(folder) == []


def test_prune_keeps_what_another_program_uses(folder, capsys):
    path = make(folder, 2).splits["train"].path
    program = (
        "import sys; from training.utils.data.rows.dataset import CachedSplit;"
        f"split = CachedSplit({path!r}, 2, {{}}); print(len(split), flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "2\n"
    run(capsys, "prune", folder, "--keep_newest", 0)
    other.communicate("")
    assert rows_left(folder) == [2]


def test_prune_keeps_what_is_being_built(folder, capsys):
    lock = storage.try_lock(str(next(folder.glob("phase1-*.lock"))))
    lines = run(capsys, "prune", folder, "--keep_newest", 0)
    os.close(lock)
    assert len(rows_left(folder)) == 1 and sum(line.endswith(": in use") for line in lines) == 1


def test_unfinished_builds_are_listed_and_pruned(tmp_path, capsys):
    def make_rows(begin, end, counts, pictures):
        if begin:
            raise KeyboardInterrupt
        return iter([TextBlock(0, np.arange(5, dtype=np.int32))])

    def build(where):
        build_shards(where, [SplitPlan("train", TextBlock, 2000, make_rows)], 1, lambda line: None)

    with pytest.raises(KeyboardInterrupt):
        open_or_build(str(tmp_path), "text", {"datasets": "a"}, build, rebuild=False, log=lambda line: None)
    [line, total] = run(capsys, "list", tmp_path)
    assert line.startswith("text-") and "unfinished" in line and total.startswith("1 in ")
    assert "unfinished" in run(capsys, "verify", tmp_path)[0]
    assert "removed text-" in run(capsys, "prune", tmp_path, "--keep_newest", 0)[0]
    assert os.listdir(tmp_path) == []


def test_mistakes(tmp_path, capsys):
    with pytest.raises(ThreestepError, match="--data_output_path: the folder '.*missing' does not"):
        main(["list", "--data_output_path", str(tmp_path / "missing")])
    with pytest.raises(ThreestepError, match="prune needs --keep_newest, .* or --max_gigabytes.*got None"):
        main(["prune", "--data_output_path", str(tmp_path)])
    with pytest.raises(ThreestepError, match="each 0 or more, got -1, None, None"):
        main(["prune", "--data_output_path", str(tmp_path), "--keep_newest", "-1"])


def test_the_program_by_its_command_line(folder):
    command = [sys.executable, "-m", "threestep.plugins.inspect.cache"]
    done = subprocess.run([*command, "list", "--data_output_path", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("phase1-") == 3 and done.stderr == ""
    done = subprocess.run([*command, "prune", "--data_output_path", str(folder)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: prune needs") and done.stderr.count("\n") == 1
