"""A hash follows content; that of a large file is remembered for as long as the file stays what it was."""

from __future__ import annotations

import os
import time

import pytest

from training.utils.data.files import digests
from training.utils.data.files.digests import digest_file, hash_parts


def test_parts_in_any_order():
    assert hash_parts({"a": "1", "b": "2"}) == hash_parts({"b": "2", "a": "1"})
    assert hash_parts({"a": "1"}) != hash_parts({"a": "2"}) != hash_parts({"b": "2"})


@pytest.fixture
def large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_ALWAYS_HASHED_BYTES", 10)
    path = tmp_path / "large.txt"
    path.write_text("x" * 100)
    return path


def settle(monkeypatch):
    """As if some time had passed since the file changed."""
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)


def test_a_large_file_is_hashed_once(large_file, tmp_path, monkeypatch):
    settle(monkeypatch)
    first = digest_file(str(large_file), str(tmp_path))
    monkeypatch.setattr(digests, "sha256_of", None)  # the file is not read again
    assert digest_file(str(large_file), str(tmp_path)) == first


def test_a_changed_file_with_its_old_size_and_time_is_noticed(large_file, tmp_path, monkeypatch):
    settle(monkeypatch)
    first = digest_file(str(large_file), str(tmp_path))
    times = large_file.stat()
    large_file.write_text("y" * 100)
    os.utime(large_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_file(str(large_file), str(tmp_path)) != first


def test_what_changed_just_now_is_not_remembered(large_file, tmp_path):
    os.utime(large_file, (time.time(), time.time()))
    digest_file(str(large_file), str(tmp_path))
    assert not (tmp_path / "file_digests.json").exists()


def test_a_damaged_memory_of_hashes_is_passed_over(large_file, tmp_path, monkeypatch):
    settle(monkeypatch)
    plain = digest_file(str(large_file), None)
    for rubbish in ("{", "[]", '{"a": 1}'):
        (tmp_path / "file_digests.json").write_text(rubbish)
        assert digest_file(str(large_file), str(tmp_path)) == plain
