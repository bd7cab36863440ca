"""Errors of the disk: those of Python, and those that libraries in Rust and C++ make of them."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from training.utils.base.errors import disk_error_in, disk_errors, disk_sentence, in_words


def test_what_is_an_error_of_the_disk():
    assert disk_error_in(OSError(errno.ENOSPC, "No space left on device")).errno == errno.ENOSPC
    assert disk_error_in(SafetensorError("Error while serializing: I/O error: x (os error 28)")).errno == errno.ENOSPC
    assert disk_error_in(RuntimeError("basic_ios::clear: iostream error")).errno == errno.EIO
    for other in (ConnectionResetError(errno.ECONNRESET, "gone"), ValueError("mine"), RuntimeError("CUDA error")):
        assert disk_error_in(other) is None
    assert disk_error_in(Exception("no such file (os error 2)")) is None


@pytest.fixture
def full() -> str:
    if not os.path.exists("/dev/full"):
        pytest.skip("a system without /dev/full")
    return "/dev/full"


def test_torch_on_a_full_disk(full):
    with pytest.raises(OSError, match="/dev/full") as refused, disk_errors(full):
        torch.save({"a": torch.zeros(100_000)}, full)
    assert refused.value.errno in (errno.ENOSPC, errno.EIO)


def test_safetensors_where_nothing_can_be_written():
    with pytest.raises(OSError, match=r"\[Errno 20\] Not a directory: '/dev/null/a'"), disk_errors("/dev/null/a"):
        save_file({"a": torch.zeros(3)}, "/dev/null/a")


def test_a_tokenizer_on_a_full_disk(full, tiny_tokenizer):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), disk_errors(full):
        tiny_tokenizer.backend_tokenizer.save(full)


def test_other_failures_leave_as_they_are():
    with pytest.raises(KeyError), disk_errors("a"):
        raise KeyError("b")
    with pytest.raises(FileNotFoundError) as missing, disk_errors("a"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "b")
    assert missing.value.filename == "b"


def test_words():
    error = OSError(errno.EIO, "Input/output error", "run/a")
    assert in_words(error) == "run/a: Input/output error"
    assert in_words(OSError(errno.EIO, "Input/output error", b"run/a")) == "run/a: Input/output error"
    assert in_words(OSError("plain")) == "a write: plain"
    assert disk_sentence(error).startswith("the disk refuses run/a: Input/output error; free space, or mend the disk")
