"""Files of the user's are run once, and every mistake in naming them is one sentence."""

from __future__ import annotations

import sys

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import check_address, is_address, load_function, load_named

FLAG = "--checker"


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("COUNT = []\nCOUNT.append(1)\ndef reward(prompts):\n    return [1.0]\n")
    return path


def test_what_the_name_stands_for(own_file):
    reward = load_function(f"{own_file}:reward", FLAG)
    assert reward(["p"]) == [1.0] and load_function(f"{own_file}:reward", FLAG) is reward
    assert load_named(f"{own_file}:COUNT", FLAG) == [1]  # run once


def test_what_has_the_form():
    assert is_address("a/b.py:f") and is_address("/c:d/b.py:f")
    assert not any(map(is_address, ("gsm8k", "b.py", "b.txt:f", "gsm8k:1.0")))


@pytest.mark.parametrize("given", ["{}", "{}:", "own.txt:reward", "{}:a-b", "reward"])
def test_another_form(own_file, given):
    with pytest.raises(ThreestepError, match="^--checker expects FILE.py:NAME, a Python file and a name in it, g"):
        check_address(given.format(own_file), FLAG)


def test_no_such_file(tmp_path):
    with pytest.raises(ThreestepError, match="^--checker expects an existing file, got '.*none.py'$"):
        check_address(f"{tmp_path}/none.py:reward", FLAG)


def test_no_such_name(own_file):
    with pytest.raises(ThreestepError, match="^--checker: '.*own.py' has no 'rewad'; did you mean 'reward'?"):
        load_named(f"{own_file}:rewad", FLAG)


def test_no_function(own_file):
    with pytest.raises(ThreestepError, match="^--checker expects a function, got '.*own.py:COUNT', which is list$"):
        load_function(f"{own_file}:COUNT", FLAG)


def test_a_file_that_does_not_load(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package\n")
    with pytest.raises(ThreestepError, match="^--checker: '.*broken.py' does not load: ModuleNotFoundError: No module"):
        load_named(f"{path}:reward", FLAG)


def test_a_mistake_is_noted(tmp_path):
    mistakes = Mistakes()
    assert mistakes.note(check_address, "reward", FLAG) is None
    assert mistakes.note(len, "abc") == 3 and len(mistakes.sentences) == 1
    assert mistakes.sentences[0].startswith("--checker expects FILE.py:NAME")


def test_a_file_imports_what_lies_beside_it_and_shadows_no_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_own.py").write_text("SCORE = 2.0\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('not the library')\n")
    path = tmp_path / "with_a_neighbour.py"
    path.write_text("import colorsys\nimport beside_the_own\nscore = beside_the_own.SCORE\n")
    assert load_named(f"{path}:score", FLAG) == 2.0
    assert sys.path[-1] == str(tmp_path)
