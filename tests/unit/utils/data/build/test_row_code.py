"""Which modules count as deciding rows, and that a change in any of them is noticed."""

from __future__ import annotations

import shutil

import pytest

from training.utils.data.build import row_code
from training.utils.data.build.row_code import code_of_rows, row_modules

DECIDES_ROWS = """
    data/build/build.py data/build/parallel_thinking.py data/build/portions.py data/build/row_maker.py
    data/build/samples.py data/build/splits.py data/build/strategies.py data/build/unsupervised.py data/chat/chat.py
    data/chat/rendering.py data/chat/spans.py data/files/arrow_rows.py data/files/json_rows.py data/files/readers.py
    data/rows/dataset.py data/rows/phases.py data/rows/tokenize.py data/sources/formats.py data/sources/messages.py
    layout/parallel.py
""".split()


def test_the_modules_that_decide_rows():
    found = [str(path.relative_to(row_code._UTILS)) for path in row_modules(row_code._UTILS)]
    assert set(DECIDES_ROWS) <= set(found)
    assert not any(name.startswith("data/cache/") or name.endswith("arguments.py") for name in found)


@pytest.mark.parametrize(
    ("changed", "counts"), [(name, True) for name in DECIDES_ROWS] + [("data/cache/cache.py", False)]
)
def test_a_changed_module_changes_the_hash(tmp_path, monkeypatch, changed, counts):
    copy = tmp_path / "utils"
    for room in ("data", "layout"):
        shutil.copytree(row_code._UTILS / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(row_code, "_UTILS", copy)
    before = code_of_rows.__wrapped__()
    with open(copy / changed, "a") as file:
        file.write("# changed\n")
    assert (code_of_rows.__wrapped__() != before) is counts
