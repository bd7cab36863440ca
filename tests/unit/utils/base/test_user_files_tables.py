"""Tables of what a flag may name."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import check_signature, either, entry_named, imported


def test_a_function_is_imported_at_its_first_call():
    program = (
        "import sys\nfrom training.utils.base.user_files import imported\nloads = imported('fractions:Fraction')\n"
        "assert 'fractions' not in sys.modules\nassert loads(1, denominator=2) == 0.5\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_with_or():
    assert [either(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a or b", "a, b or c"]


def test_unknown_names_get_suggestions():
    table = {"first": 1, "second": 2}
    assert entry_named("--flag", "second", table, int) == 2
    with pytest.raises(ThreestepError) as caught:
        entry_named("--flag", "frist", table, int)
    assert str(caught.value) == (
        "--flag expects one of first, second or FILE.py:NAME, got 'frist'; did you mean 'first'?"
    )


def test_functions_without_a_signature_are_taken_as_they_are(tmp_path):
    (tmp_path / "own.py").write_text("take = max\n")
    entry = entry_named("--flag", f"{tmp_path}/own.py:take", {}, partial)
    assert entry.func is max
    check_signature(entry.func, "--flag", "own.py:take", ("a", "b"))
    assert imported("math:sqrt")(4.0) == 2.0
