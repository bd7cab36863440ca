"""Settings and tensors from files, or one sentence with the place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from threestep.plugins.audit.reading import read_settings, read_tensors
from training.utils.base.errors import ThreestepError


def test_what_is_no_file_is_refused_and_settings_that_are_not_there_are_none(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    os.symlink("nowhere", tmp_path / "link")
    for name in ("folder", "link"):
        for read in (read_settings, read_tensors):
            with pytest.raises(ThreestepError, match=f"{name} expects .*, and is no file"):
                read(tmp_path / name)
    assert read_settings(tmp_path / "gone") == {}
    with pytest.raises(ThreestepError, match="gone expects tensors, and is missing"):
        read_tensors(tmp_path / "gone")


@pytest.mark.parametrize("text", ["a: b: c", "- [", "[1]", "1: 2", "9" * 6000, "!!python/object/apply:os.getcwd []"])
def test_settings_are_a_mapping(tmp_path: Path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ThreestepError, match="config.yaml"):
        read_settings(path)
    path.write_text("a: 1\nb: [x]\n")
    assert read_settings(path) == {"a": 1, "b": ["x"]}


def test_tensors_are_whole(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file({"x": np.arange(3)}, path)
    assert read_tensors(path)["x"].tolist() == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ThreestepError, match="expects safetensors of integers, booleans or floats"):
        read_tensors(path)
