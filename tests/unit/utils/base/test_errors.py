"""Sentences for users."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from training.utils.base.errors import (
    Mistakes,
    ThreestepError,
    disk_error_in,
    disk_errors,
    disk_sentence,
    first_line,
    in_words,
    nearest_names,
)


def test_nearest_names():
    names = ["data_path", "data_split", "seed"]
    assert nearest_names("data_pth", names) == "; did you mean 'data_path' or 'data_split'?"
    assert nearest_names("sed", names) == "; did you mean 'seed'?"
    assert nearest_names("zzz", names) == ""
    assert nearest_names("x", []) == ""


@pytest.mark.parametrize(
    ("sentences", "told"),
    [
        (["too small"], "too small"),
        (["a", "b"], "2 mistakes in the configuration:\n  - a\n  - b"),
        (["a"] * 200, "a (200 times)"),
        (["a"] * 200 + ["b"], "2 mistakes in the configuration:\n  - a (200 times)\n  - b"),
    ],
)
def test_mistakes_are_told_together(sentences, told):
    mistakes = Mistakes()
    mistakes.require(True, "fine")
    mistakes.raise_if_any()
    for sentence in sentences:
        mistakes.require(False, sentence)
    with pytest.raises(ValueError) as raised:
        mistakes.raise_if_any()
    assert isinstance(raised.value, ThreestepError) and str(raised.value) == told


def test_many_different_mistakes_stay_readable():
    mistakes = Mistakes()
    for number in range(1200):
        mistakes.add(f"mistake {number}")
    with pytest.raises(ThreestepError) as raised:
        mistakes.raise_if_any()
    first, *lines = str(raised.value).splitlines()
    assert first.startswith("1,200 mistakes") and len(lines) < 30 and lines[-1].endswith("more")


def test_a_line_that_is_cut_shows_no_half_of_a_password():
    """The address begins at character 180, and the line ends at 200, amid the password."""
    text = "x" * 179 + " https://user:a-long-password@host/rows.jsonl could not be read\nand more"
    assert first_line(OSError(text)) == ("x" * 179 + " https://***@host/rows.jsonl could not be read")[:200]
    assert first_line(OSError()) == "OSError"


def test_what_is_an_error_of_the_disk():
    assert disk_error_in(OSError(errno.ENOSPC, "No space left on device")).errno == errno.ENOSPC
    assert disk_error_in(SafetensorError("Error while serializing: I/O error: x (os error 28)")).errno == errno.ENOSPC
    assert disk_error_in(RuntimeError("basic_ios::clear: iostream error")).errno == errno.EIO
    for other in (ConnectionResetError(errno.ECONNRESET, "gone"), ValueError("mine"), RuntimeError("CUDA error")):
        assert disk_error_in(other) is None
    assert disk_error_in(Exception("no such file (os error 2)")) is None


@pytest.mark.parametrize(
    ("write", "place", "words"),
    [
        (lambda _: torch.save({"a": torch.zeros(100_000)}, "/dev/full"), "/dev/full", "/dev/full"),
        (
            lambda _: save_file({"a": torch.zeros(3)}, "/dev/null/a"),
            "/dev/null/a",
            r"\[Errno 20\] Not a directory: '/dev/null/a'",
        ),
        (
            lambda tokenizer: tokenizer.backend_tokenizer.save("/dev/full"),
            "/dev/full",
            "No space left on device",
        ),
    ],
    ids=["torch", "safetensors", "a tokenizer"],
)
def test_a_disk_that_refuses(tiny_tokenizer, write, place, words):
    if not os.path.exists("/dev/full"):
        pytest.skip("a system without /dev/full")
    with pytest.raises(OSError, match=words) as refused, disk_errors(place):
        write(tiny_tokenizer)
    assert refused.value.errno in (errno.ENOSPC, errno.EIO, errno.ENOTDIR)


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
    assert disk_sentence(error).startswith(
        "cannot write to disk: run/a: Input/output error; free space, or fix the disk"
    )
