"""Files with their checksum, and refusals that say where."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.small_disk import largest_file
from training.utils.base.storage import (
    HashedFile,
    WrittenOutTooLong,
    lock_exclusively,
    parse_json,
    parse_yaml,
    publish_folder,
    read_json_object,
    remove,
    replace_file,
    sha256_of,
    share,
    try_lock,
    write_json,
)


def test_size_and_checksum_are_those_of_the_file(tmp_path):
    path = tmp_path / "file"
    with HashedFile(str(path)) as file:
        for part in (b"one", memoryview(b"two"), b"", b"x" * 3_000_000):
            assert file.write(part) == len(part)
    content = path.read_bytes()
    assert content[:6] == b"onetwo" and file.size_bytes == len(content) == 3_000_006 and file.closed
    assert file.sha256 == sha256_of(str(path)) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", [10_000, 3_000_000], ids=["at-the-close", "at-a-write"])
def test_a_refused_write_names_its_file(tmp_path, size):
    path = str(tmp_path / "file")

    with pytest.raises(OSError) as failure, largest_file(1000), HashedFile(path) as file:
        file.write(b"x" * size)
    assert (failure.value.errno, failure.value.filename) == (errno.EFBIG, path)
    with pytest.raises(OSError) as failure, largest_file(1000):
        write_json(path, ["x" * size])
    assert (failure.value.errno, failure.value.filename) == (errno.EFBIG, path)


def test_the_first_failure_is_the_one_that_is_told(tmp_path):
    refused = pytest.raises(ValueError, match="a wrong row")
    with refused, largest_file(1000), HashedFile(str(tmp_path / "file")) as file:
        file.write(b"x" * 10_000)
        raise ValueError("a wrong row")  # closing fails too


def test_json_objects(tmp_path):
    path = tmp_path / "file"
    assert read_json_object(str(path)) is None
    write_json(str(path), {"a": "é"})
    assert read_json_object(str(path)) == {"a": "é"}
    deep = "[" * 100_000 + "]" * 100_000
    for rubbish in ("[]", "{", "\xff", deep):
        path.write_text(rubbish, "latin-1")
        assert read_json_object(str(path)) is None
    for text, levels in ((deep, None), (deep, 5), ("[[[1]]]", 2), ('{"a": {"b": [{}]}}', 3)):
        with pytest.raises(json.JSONDecodeError, match="are nested too deeply"):
            parse_json(text, levels)
    assert parse_json("[[[1]]]", 3) == [[[1]]] and parse_json('{"a": {"b": [{}]}}', 4) == {"a": {"b": [{}]}}


def test_yaml_that_takes_memory_is_no_yaml():
    merged = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    for text in (merged, "a: &a [*a]\n"):
        with pytest.raises(WrittenOutTooLong, match="its aliases expand to more than 100,000 values"):
            parse_yaml(text)
    with pytest.raises(ValueError, match="are nested too deeply"):
        parse_yaml("[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match="it has 5,000,000 characters, more than 4,194,304"):
        parse_yaml("x" * 5_000_000)
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}
    assert parse_yaml("") is None


def test_one_holds_a_lock_until_it_closes_it(tmp_path):
    path = str(tmp_path / "a.lock")
    first = try_lock(path)
    assert first is not None and try_lock(path) is None
    os.close(first)
    second = try_lock(path)
    assert second is not None
    os.close(second)


def test_a_lock_on_a_removed_file_is_none(tmp_path, monkeypatch):
    """Its holder removes the file between our opening it and our locking it: the next one would lock another file."""
    path = str(tmp_path / "a.lock")
    lock = fcntl.flock

    def removed_before(handle, how):
        os.remove(path)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    assert try_lock(path) is None
    monkeypatch.undo()
    assert try_lock(path) is not None


def test_what_is_shared_is_nobodys_own(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with path.open() as file, ExitStack() as until:
        share(file)
        assert not lock_exclusively(str(path), until)
    with ExitStack() as until:
        assert lock_exclusively(str(path), until) and lock_exclusively(str(tmp_path / "missing"), until)


def folder_with(path: Path, text: str) -> Path:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_text(text)
    (path / "inner" / "file").chmod(0o600)
    return path


@pytest.mark.parametrize("before", ["nothing", "a folder", "a file", "a link", "a dangling link"])
def test_a_folder_takes_the_place_of_whatever_is_there(tmp_path, before):
    theirs = folder_with(tmp_path / "theirs", "theirs")
    place = tmp_path / "model"
    if before == "a folder":
        folder_with(place, "old")
    elif before == "a file":
        place.write_text("old")
    elif before != "nothing":
        place.symlink_to(theirs if before == "a link" else tmp_path / "nowhere")
    publish_folder(folder_with(tmp_path / "beside", "new"), place)
    assert not place.is_symlink() and (place / "inner" / "file").read_text() == "new"
    assert (theirs / "inner" / "file").read_text() == "theirs"  # a link is not followed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "theirs"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert (place / "inner" / "file").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("call", [0, 1])
def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch, call):
    place = folder_with(tmp_path / "model", "old")
    beside = folder_with(tmp_path / "beside", "new")
    rename, calls = os.rename, []

    def refused(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == call + 1:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="Input/output"):
        publish_folder(beside, place)
    assert (place / "inner" / "file").read_text() == "old" and (beside / "inner" / "file").read_text() == "new"


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_what_is_removed(tmp_path):
    folder_with(tmp_path / "a", "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    remove(tmp_path / "link")
    assert (tmp_path / "a" / "inner" / "file").exists() and not (tmp_path / "link").is_symlink()
    remove(tmp_path / "a")
    remove(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
