"""Builds in shards: the same bytes however they are cut, shared or stopped; what stops them is told and undone."""

from __future__ import annotations

import errno
import inspect
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_disk import small_disk
from tests.unit.utils.data.conftest import cut_short, flip_a_byte, pair_rows
from training.utils.base import storage
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import TextBlock
from training.utils.data.build.build import build_phase
from training.utils.data.cache import shards
from training.utils.data.cache.cache import open_or_build
from training.utils.data.cache.shards import (
    Counts,
    SplitPlan,
    SplitReport,
    build_shards,
    join_splits,
    shard_ranges,
    split_sentence,
)
from training.utils.data.cache.workers import BuildStopped

RAW_ROWS = 5000


def make(begin, end, counts, pictures=None):
    """Every seventh row is dropped, row i has i % 5 + 1 tokens."""
    for row in range(begin, end):
        if row % 7 == 0:
            counts.dropped["seventh"] += 1
        else:
            yield TextBlock(row, np.full(row % 5 + 1, row, np.int32))


@pytest.fixture
def ask(tmp_path):
    """Build 5,000 rows with `make`, or find them; returns (opened folder, lines logged)."""

    def call(make=make, num_workers=1):
        log: list[str] = []

        def build(folder):
            built = build_shards(folder, [SplitPlan("train", TextBlock, RAW_ROWS, make)], num_workers, log.append)
            return join_splits(folder, built)

        return open_or_build(str(tmp_path), "text", {"datasets": "a"}, build, rebuild=False, log=log.append), log

    return call


def content(folder):
    return Path(folder.path, "train.arrow").read_bytes()


def left_in(tmp_path):
    """What a cache folder holds but locks, with the shards of builds that were stopped."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix != ".lock")


@pytest.fixture
def whole(ask):
    """The bytes of a build that nothing disturbed; the cache is empty again."""
    folder, _ = ask()
    kept = content(folder)
    shutil.rmtree(folder.path)
    return kept


@pytest.mark.parametrize("raw_rows", [0, 1, 511, 512, 513, 7473, 512 * 256 + 1, 10**6, 10**8])
def test_shards_cover_every_row_once(raw_rows):
    ranges = shard_ranges(raw_rows)
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges)][:-1] if ranges else raw_rows == 0
    assert all(0 < end - begin <= 8192 for begin, end in ranges) and (not ranges or ranges[-1][1] == raw_rows)
    assert len(ranges) <= 256 or raw_rows > 256 * 8192 - 8192


def test_what_is_built_is_every_row_and_its_counts(ask):
    folder, _ = ask()
    kept = [row for row in range(RAW_ROWS) if row % 7]
    assert [row.row_id for row in folder.splits["train"]] == kept
    assert all((row.input_ids == row.row_id).all() for row in folder.splits["train"])
    entry = folder.manifest["splits"]["train"]
    assert entry["rows"] == len(kept) and entry["tokens"] == sum(row % 5 + 1 for row in kept)
    assert entry["dropped"] == {"seventh": RAW_ROWS - len(kept)} and entry["truncated"] == 0
    assert entry["sha256"] == storage.sha256_of(folder.splits["train"].path)
    assert sorted(os.listdir(folder.path)) == ["manifest.json", "train.arrow"]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("length", [100, 999, 8192])
def test_the_same_bytes_for_any_workers_and_shards(ask, whole, monkeypatch, num_workers, length):
    monkeypatch.setattr(shards, "_LEAST_ROWS", length)
    folder, _ = ask(num_workers=num_workers)
    assert content(folder) == whole


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_the_same_rows_of_a_phase_for_any_workers_and_shards(flags, tiny_tokenizer, tmp_path, monkeypatch, phase):
    rows = [{**row, "prompt": row["prompt"] * (i % 9 + 1)} for i, row in enumerate(pair_rows(300))]
    data = flags(rows, max_seq_len=60, max_prompt_seq_len=60, eval_fraction=0.2)
    found = []
    for length, num_workers in ((512, 1), (7, 1), (7, 3)):
        monkeypatch.setattr(shards, "_LEAST_ROWS", length)
        data.cache.num_workers = num_workers
        built = build_phase(phase, data, tiny_tokenizer, 1)
        assert not built.report.from_cache
        found.append(([Path(split.path).read_bytes() for split in (built.train, built.eval)], built.report))
        shutil.rmtree(data.cache.cache_dir)
    assert found[0] == found[1] == found[2]
    assert found[0][1].train.dropped or found[0][1].train.truncated


# --- stopped and gone on with


def stops_at(row, failure):
    """`make` until a row is reached; `made` says what was asked for."""
    made: list[int] = []

    def stopping(begin, end, counts, pictures):
        made.append(begin)
        if begin <= row < end:
            raise failure
        return make(begin, end, counts)

    return stopping, made


@pytest.mark.parametrize(
    "failure",
    [KeyboardInterrupt(), SystemExit(3), OSError(errno.EIO, "the dataset's disk broke"), BuildStopped("a stop")],
    ids=lambda failure: type(failure).__name__,
)
def test_finished_shards_of_a_stopped_build_are_used_again(ask, whole, tmp_path, failure):
    stopping, made = stops_at(2100, failure)
    with pytest.raises(type(failure)):
        ask(stopping)
    assert made == [0, 512, 1024, 1536, 2048]
    assert sum(name.endswith(".arrow") for name in left_in(tmp_path)) == 4
    going_on, made = stops_at(-1, None)
    folder, log = ask(going_on)
    assert made == list(range(2048, RAW_ROWS, 512)) and content(folder) == whole
    assert any("reusing 4 of 10 shards from an interrupted build" in line for line in log)
    assert len(left_in(tmp_path)) == 3  # the folder and its two files


@pytest.mark.parametrize("failure", [ThreestepError("a wrong row"), KeyError("a wrong class")], ids=["data", "code"])
def test_a_mistake_in_the_data_or_the_code_leaves_nothing(ask, tmp_path, failure):
    with pytest.raises(type(failure)):
        ask(stops_at(2100, failure)[0])
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("ending", "harm"),
    [
        ("arrow", flip_a_byte),
        ("arrow", cut_short),
        ("arrow", os.remove),
        ("json", os.remove),
        ("json", lambda path: path.write_text("{")),
        ("json", lambda path: path.write_text(path.read_text().replace("text-", "other-"))),
    ],
    ids=["flipped", "cut", "removed", "no-json", "half-json", "another-build's"],
)
def test_a_damaged_shard_is_found_and_built_again(ask, whole, tmp_path, ending, harm):
    with pytest.raises(KeyboardInterrupt):
        ask(stops_at(2100, KeyboardInterrupt())[0])
    [path] = tmp_path.rglob(f"train-000000512-000001024.{ending}")
    harm(path)
    going_on, made = stops_at(-1, None)
    folder, _ = ask(going_on)
    assert made[0] == 512 and made[1:] == list(range(2048, RAW_ROWS, 512)) and content(folder) == whole


PROGRAM = f"""
import os, sys, time
import numpy as np
from training.utils.data.cache import shards
from training.utils.data.cache.cache import open_or_build
from training.utils.contracts.rows import TextBlock
from training.utils.base import storage

shards._LEAST_ROWS = 100
RAW_ROWS = {RAW_ROWS}
folder, num_workers, seconds, rebuild = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "True"

{inspect.getsource(make)}
def slowly(begin, end, counts, pictures):
    time.sleep(seconds)
    return make(begin, end, counts)

def build(where):
    print("building", flush=True)
    built = shards.build_shards(where, [shards.SplitPlan("train", TextBlock, RAW_ROWS, slowly)], num_workers, print)
    return shards.join_splits(where, built)

opened = open_or_build(folder, "text", {{"datasets": "a"}}, build, rebuild=rebuild, log=print)
print("rows", len(opened.splits["train"]))
"""


def start(folder, num_workers, seconds, rebuild=False):
    command = [sys.executable, "-u", "-c", PROGRAM, str(folder), str(num_workers), str(seconds), str(rebuild)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(process, words):
    """Read what a process says until it says these words."""
    said = []
    for line in process.stdout:
        said.append(line)
        if words in line:
            return
    raise AssertionError("".join(said))


def test_builds_killed_at_any_moment_are_gone_on_with(tmp_path, ask, whole):
    moments = random.Random(1)
    for _ in range(3):
        process = start(tmp_path, 2, 0.02)
        until(process, "building")
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    # A slow machine may have been stopped before its first shard, a fast one behind its last.
    finished, complete = list(tmp_path.rglob("train-*.json")), list(tmp_path.rglob("manifest.json"))
    folders = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert complete or all(name.endswith((".building", ".shards")) for name in folders), folders
    # Its orphaned workers end by themselves and let go of the lock, for which this one waits.
    output, _ = start(tmp_path, 2, 0.0).communicate(timeout=120)
    assert "rows 4285" in output
    if complete:
        assert "text rows read from the cache in" in output
    elif finished:
        assert "shards from an interrupted build" in output
    folder, log = ask()
    assert folder.resumed and content(folder) == whole, log


@pytest.mark.parametrize("rebuild", [False, True])
def test_several_that_want_the_same_split_build_it_once(tmp_path, ask, whole, rebuild):
    if rebuild:
        assert not ask()[0].resumed
    processes = [start(tmp_path, 2, 0.02, rebuild) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert sum("tokenized in" in output for output in outputs) == 1
    assert sum("read from the cache in" in output for output in outputs) == 2
    assert any("waiting for another process" in output for output in outputs)
    assert content(ask()[0]) == whole


def test_one_that_waits_goes_on_where_the_killed_one_was(tmp_path, ask, whole):
    first = start(tmp_path, 2, 1.0)  # slow enough for a busy machine: the second begins before it ends
    while not list(tmp_path.rglob("*.json")):
        time.sleep(0.02)
    second = start(tmp_path, 2, 0.0)
    until(second, "waiting for another process")
    first.kill()
    first.communicate()
    output = second.stdout.read()  # with what was read ahead
    second.wait(timeout=60)
    assert "shards from an interrupted build" in output and "rows" in output
    assert content(ask()[0]) == whole


# --- a disk that refuses


def fill_after(monkeypatch, size_bytes):
    """As if the disk were full after so many bytes: a write that goes beyond raises, and so does all that follows."""
    written = [0]
    write = storage.HashedFile.write

    def refusing(file, content):
        written[0] += len(memoryview(content).cast("B"))
        if written[0] > size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)
        return write(file, content)

    monkeypatch.setattr(storage.HashedFile, "write", refusing)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_full_disk_names_the_folder_and_leaves_finished_shards_alone(ask, whole, tmp_path, monkeypatch, num_workers):
    with monkeypatch.context() as patch:
        fill_after(patch, 40_000)
        with pytest.raises(BuildStopped) as failure:
            ask(num_workers=num_workers)
    assert str(failure.value) == (
        f"--data_output_path: the folder '{tmp_path}' is full (No space left on device): free some space and run again "
        "(finished shards are reused), or use another folder"
    )
    left = left_in(tmp_path)
    assert not any(name.endswith(".part") for name in left) and any(name.endswith(".arrow") for name in left)
    folder, log = ask(num_workers=num_workers)
    assert content(folder) == whole and any("shards from an" in line for line in log)


def test_a_small_disk(ask, whole, tmp_path):
    """The rows need 145 kB, and as much again for their shards."""
    with small_disk(tmp_path, 200 * 1024), pytest.raises(BuildStopped, match="is full .No space left on"):
        ask()
    assert content(ask()[0]) == whole


def test_a_disk_that_is_full_when_the_shards_are_joined(ask, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fill_after(patch, 200_000)  # the shards need 145 kB, the split as much again
        with pytest.raises(BuildStopped, match="is full"):
            ask()
    assert sum(name.endswith(".json") for name in left_in(tmp_path)) == 10
    assert not any(name.endswith("train.arrow") for name in left_in(tmp_path))
    assert content(ask(stops_at(0, KeyboardInterrupt())[0])[0]) == whole  # nothing is made again


def test_a_limit_of_the_system_is_a_full_disk(ask, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        with pytest.raises(BuildStopped, match="is full .File too large."):
            ask()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_in(tmp_path) == []  # not one shard was finished


def test_a_failure_of_the_datasets_own_disk_is_not_the_caches(ask):
    def broken(begin, end, counts, pictures):
        raise FileNotFoundError(errno.ENOENT, "No such file", "/data/rows.bin")

    with pytest.raises(FileNotFoundError, match="/data/rows.bin"):
        ask(broken)


# --- the bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_alone(ask, monkeypatch, capfd):
    folder, _ = ask()
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(folder.path)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyboardInterrupt):
        ask(stops_at(2100, KeyboardInterrupt())[0])
    # 2,048 of 5,000 rows, time gone and left, and both rates
    assert "2048/5000" in terminal.getvalue() and "row/s" in terminal.getvalue() and "tokens/s" in terminal.getvalue()


def test_nothing_but_reasons_follows_what_was_dropped():
    counts = Counts(truncated=3)
    counts.dropped.update(too_long=2, empty_response=1)
    counts.noted["whose response follows the prompt"] = 54
    counts.parallel["with blocks"] = 7
    said = split_sentence("train", SplitReport(rows=54, tokens=1234, **counts.as_json()))
    kept, _, dropped = said.partition("dropped: ")
    assert dropped == "1 empty_response, 2 too_long"
    assert all(part in kept for part in ("54 rows", "3 truncated", "54 whose response follows", "7 with blocks"))
