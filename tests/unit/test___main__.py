"""The path on which a rank finds the package: not the current folder's modules first."""

from __future__ import annotations

import pytest

from training.__main__ import PACKAGE, ROOT, main, search_path


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (["", "/lib", ROOT], ["/lib", ROOT]),  # -c
        (["/work", "/lib", ROOT], ["/lib", ROOT]),  # -m
        ([PACKAGE, "/lib", ROOT], ["/lib", ROOT]),  # the package's folder
        (["/work", "/lib"], [ROOT, "/lib"]),  # nothing is installed
        (["/lib", "/work", ROOT], ["/lib", "/work", ROOT]),  # -P, and the user's PYTHONPATH
        ([], [ROOT]),
    ],
)
def test_what_stays_on_the_path(path, kept):
    assert search_path(path, here="/work") == kept


def test_where_one_works_in_the_checkout_it_stays():
    assert search_path([ROOT, "/lib"], here=ROOT) == [ROOT, "/lib"]


@pytest.mark.parametrize("words", [[], ["--config", "x"]])
def test_a_module_is_expected_first(words):
    with pytest.raises(SystemExit, match="^error: expected a module first, such as training.step1_sft.main, got none$"):
        main(words)
