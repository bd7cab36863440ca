"""Files of others: a value of the type that is asked for, or one sentence with the place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.heavy import heavy_modules_after
from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, checked_value, read_text, text_if_there


@dataclass(frozen=True)
class Entry:
    step: int
    figures: dict[str, float | None]
    name: str = ""


def test_a_value_has_its_types():
    text = '{"step": 3, "figures": {"loss": 1, "lost": null, "huge": NaN}, "more": []}'
    found = checked_json(Entry, text, "f.json")
    assert (found.step, found.name, type(found.figures["loss"])) == (3, "", float)
    assert found.figures["lost"] is None and np.isnan(found.figures["huge"])
    assert checked_value(list[str], ["a"], "f.yaml") == ["a"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", r"f.json: expects JSON: EOF while parsing"),
        ('{"step": "3", "figures": {}}', r"f.json: step expects a valid integer, got '3'$"),
        ('{"step": true, "figures": {}}', r"f.json: step expects a valid integer, got True$"),
        ('{"figures": {}}', r"f.json: step is missing$"),
        ('{"step": 1.5, "figures": {"a": "b"}}', r"f.json: step expects a valid integer.*\(and 1 more\)$"),
        ("[" * 100_000, "f.json: expects JSON: recursion limit exceeded"),
        ('{"step": ' + "9" * 6000 + "}", "f.json: expects JSON: number out of range"),
        ('{"step": 1, "figures": {"a": "\\ud800"}}', "f.json: expects JSON"),
        ("[]", "f.json: expects an object"),
    ],
    ids=range(9),
)
def test_another_value_is_a_sentence(text, sentence):
    with pytest.raises(ThreestepError, match=sentence) as refusal:
        checked_json(Entry, text, "f.json")
    assert len(str(refusal.value)) < 200


def test_what_is_no_file_is_refused_and_only_what_is_not_there_is_nothing(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "link")
    for name in ("folder", "pipe", "link"):
        for read in (read_text, text_if_there):
            with pytest.raises(ThreestepError, match=f"{name} expects .*, and is no file"):
                read(tmp_path / name)
    assert text_if_there(tmp_path / "gone") is None
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(ThreestepError, match="expects a text in UTF-8, and byte 2 is not of one"):
        read_text(tmp_path / "bytes")


def test_importing_it_waits_for_no_pydantic():
    script = "import sys, training.utils.base.reading; assert 'pydantic' not in sys.modules"
    assert heavy_modules_after(script)[0] == []
