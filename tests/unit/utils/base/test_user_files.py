"""Files of the user's are run once, and every mistake in naming them is one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import (
    check_signature,
    either,
    entry_named,
    imported,
    is_address,
    load_function,
    load_named,
)

FLAG = "--checker"


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("COUNT = []\nCOUNT.append(1)\ndef reward(prompts):\n    return [1.0]\n")
    return path


FORM = "^--checker expects FILE.py:NAME, a Python file and a name defined in it, got"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *((each, FORM) for each in ("{}", "{}:", "own.txt:reward", "{}:a-b", "reward", "gsm8k:1.0")),
        ("none.py:reward", "^--checker expects an existing file, got 'none.py'$"),
        ("{}:rewad", "^--checker: '.*own.py' has no 'rewad'; did you mean 'reward'?"),
        ("{}:COUNT", "^--checker expects a function, got '.*own.py:COUNT', which is of type list$"),
        ("{}/../broken.py:reward", "^--checker: '.*broken.py' does not load: ModuleNotFoundError: No module"),
    ],
)
def test_what_cannot_be_loaded(own_file, given, words):
    own_file.with_name("broken.py").write_text("import no_such_package\n")
    path = given.replace("{}/..", str(own_file.parent)).format(own_file)
    mistakes = Mistakes()
    assert mistakes.note(load_function, path, FLAG) is None and mistakes.note(len, "abc") == 3
    (sentence,) = mistakes.sentences
    assert re.match(words, sentence)


def test_what_the_name_stands_for(own_file):
    reward = load_function(f"{own_file}:reward", FLAG)
    assert reward(["p"]) == [1.0] and load_function(f"{own_file}:reward", FLAG) is reward
    assert load_named(f"{own_file}:COUNT", FLAG) == [1]  # run once
    assert is_address("a/b.py:f") and is_address("/c:d/b.py:f")
    assert not any(map(is_address, ("gsm8k", "b.py", "b.txt:f", "gsm8k:1.0")))


def test_a_file_imports_what_lies_beside_it_and_shadows_no_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_own.py").write_text("SCORE = 2.0\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('not the library')\n")
    path = tmp_path / "with_a_neighbour.py"
    path.write_text("import colorsys\nimport beside_the_own\nscore = beside_the_own.SCORE\n")
    assert load_named(f"{path}:score", FLAG) == 2.0
    assert sys.path[-1] == str(tmp_path)


def test_a_function_is_imported_at_its_first_call():
    program = (
        "import sys\nfrom training.utils.base.user_files import imported\nloads = imported('fractions:Fraction')\n"
        "assert 'fractions' not in sys.modules\nassert loads(1, denominator=2) == 0.5\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_names_get_suggestions():
    assert [either(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a or b", "a, b or c"]
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
