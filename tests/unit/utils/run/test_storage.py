"""Files with their checksum, and refusals that say where."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
from contextlib import ExitStack

import pytest

from training.utils.run.storage import (
    HashedFile,
    naming,
    parse_json,
    read_json_object,
    sha256_of,
    share,
    try_lock,
    try_to_own,
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


def limited(size_bytes, write):
    """Run `write` while no file may grow beyond a size; a real refusal by the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [10_000, 3_000_000], ids=["at-the-close", "at-a-write"])
def test_a_refused_write_names_its_file(tmp_path, size):
    path = str(tmp_path / "file")

    def write():
        with HashedFile(path) as file:
            file.write(b"x" * size)

    with pytest.raises(OSError) as failure:
        limited(1000, write)
    assert (failure.value.errno, failure.value.filename) == (errno.EFBIG, path)
    with pytest.raises(OSError) as failure:
        limited(1000, lambda: write_json(path, ["x" * size]))
    assert (failure.value.errno, failure.value.filename) == (errno.EFBIG, path)


def test_the_first_failure_is_the_one_that_is_told(tmp_path):
    def write():
        with HashedFile(str(tmp_path / "file")) as file:
            file.write(b"x" * 10_000)
            raise ValueError("a wrong row")  # closing fails too

    with pytest.raises(ValueError, match="a wrong row"):
        limited(1000, write)


def test_an_error_keeps_the_name_it_has():
    with pytest.raises(OSError) as failure, naming("mine"):
        raise OSError(1, "no", "yours")
    assert failure.value.filename == "yours"


def test_json_objects(tmp_path):
    path = tmp_path / "file"
    assert read_json_object(str(path)) is None
    write_json(str(path), {"a": "é"})
    assert read_json_object(str(path)) == {"a": "é"}
    for rubbish in ("[]", "{", "\xff"):
        path.write_text(rubbish, "latin-1")
        assert read_json_object(str(path)) is None


def test_json_nested_too_deeply_is_no_json(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    for text, levels in ((deep, None), (deep, 5), ("[[[1]]]", 2), ('{"a": {"b": [{}]}}', 3)):
        with pytest.raises(json.JSONDecodeError, match="stand inside each other on too many levels"):
            parse_json(text, levels)
    assert parse_json("[[[1]]]", 3) == [[[1]]] and parse_json('{"a": {"b": [{}]}}', 4) == {"a": {"b": [{}]}}
    (tmp_path / "a.json").write_text(deep)
    assert read_json_object(str(tmp_path / "a.json")) is None


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
        assert not try_to_own(str(path), until)
    with ExitStack() as until:
        assert try_to_own(str(path), until) and try_to_own(str(tmp_path / "missing"), until)
