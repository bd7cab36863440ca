"""Import graphs of packages of a few lines: what the house's rules on imports stand on."""

from __future__ import annotations

import pytest

from tests.support.imports import circles, import_graph, imports

CHAIN = {"p.a": "from p import b, c", "p.b": "import p.c\n", "p.c": "", "p.__init__": ""}


def test_an_import_for_type_checkers_in_a_function_or_in_a_main_block_is_not_eager():
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING: import torch
def f(): import numpy
if __name__ == "__main__": import pandas
"""
    eager = {found.module: found.eager for found in imports("training.x", source)}
    assert eager["typing"] and not (eager["torch"] or eager["numpy"] or eager["pandas"])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from p import x, VERSION", {"p.x", "p.__init__"}),
        ("from . import x", {"p.x"}),
        ('TABLE = [imported("p.x:fn", 3), imported(z)]', {"p.x"}),
    ],
)
def test_a_name_imported_from_a_package_or_in_a_table_is_its_module(source, found):
    assert import_graph({"p.__init__": "", "p.a": source, "p.x": "", "p.y": ""})["p.a"] == found


@pytest.mark.parametrize(
    "closing",
    [
        "def f():\n    from p import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import A",
        "import importlib\ndef f():\n    importlib.import_module('p.a')",
        "def f():\n    return imported('p.a:name')",
    ],
)
def test_a_lazy_import_closes_a_circle(closing):
    assert circles(import_graph(CHAIN)) == []
    sources = {**CHAIN, "p.c": closing}
    assert circles(import_graph(sources)) == [["p.a", "p.c", "p.a"]]
    assert circles(import_graph(sources, eager_alone=True)) == []
