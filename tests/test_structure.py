"""Import graphs and the figures of `python -m tests.support.structure`, on packages of a few lines."""

from __future__ import annotations

import sys

import pytest

from tests.support import sources, structure
from tests.support.imports import circles, floors, import_graph, imports

CHAIN = {"p.a": "from p import b, c", "p.b": "import p.c\n", "p.c": "", "p.__init__": ""}
LINES = "".join(f"x{number} = {number}\n" for number in range(8))


def test_an_import_for_type_checkers_in_a_function_or_in_a_main_block_is_not_eager():
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING: import torch
def f(): import numpy
if __name__ == "__main__": import pandas
"""
    eager = {found.module: found.eager for found in imports("training.x", source)}
    assert eager["typing"] and not (eager["torch"] or eager["numpy"] or eager["pandas"])


def test_a_name_imported_from_a_package_is_its_module_or_the_package():
    sources = {"p.__init__": "", "p.a": "from p import b, VERSION", "p.b": "from . import a", "q": "from p import b"}
    assert import_graph(sources) == {"p.__init__": set(), "p.a": {"p.b", "p.__init__"}, "p.b": {"p.a"}, "q": {"p.b"}}


def test_a_table_imports_what_it_names():
    source = 'Y = f"{__name__}.y"\nTABLE = [imported(f"{__name__}.x:fn", 3), imported(f"{Y}:fn"), imported(z)]'
    assert import_graph({"p.__init__": source, "p.x": "", "p.y": "", "p.z": ""})["p.__init__"] == {"p.x", "p.y"}


def test_a_chain_has_as_many_floors_as_modules_and_no_circle():
    graph = import_graph(CHAIN)
    assert floors(graph) == 3
    assert circles(graph) == []


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
    sources = {**CHAIN, "p.c": closing}
    assert circles(import_graph(sources)) == [["p.a", "p.c", "p.a"]]
    assert circles(import_graph(sources, eager_alone=True)) == []


def test_two_circles_are_two_and_one_through_a_package_is_seen():
    sources = {"p.a": "import p.b", "p.b": "import p.a", "q.__init__": "from q.x import X", "q.x": "from q import X"}
    assert circles(import_graph(sources)) == [["p.a", "p.b", "p.a"], ["q.__init__", "q.x", "q.__init__"]]


def test_statements_are_counted_whatever_line_they_are_on():
    source = """
def f(a, *b, c=1, **d):
    "What it does."
    x = 1; y = (
        2
    )
    def g(): return x
    return g
"""
    (name, function, is_method), inner = sources.functions(source)
    assert (name, sources.statements(function), sources.parameters(function, is_method)) == ("f", 5, 4)
    assert inner[0] == "f.g"


def test_self_and_cls_are_no_parameters():
    source = "class A:\n  def f(self, a): ...\n  @classmethod\n  def g(cls, a): ...\n  @staticmethod\n  def h(a): ...\n"
    assert [sources.parameters(node, method) for _, node, method in sources.functions(source)] == [1, 1, 1]


def test_code_lines_leave_out_docstrings_comments_imports_and_blank_lines():
    source = '"""What\nit is."""\nimport os\n\n# why\ndef f():\n    """What it does."""\n    return os.sep  # how\n'
    assert structure.code_lines(source) == [(6, "def f():"), (8, "return os.sep  # how")]


def test_a_pair_of_places_counts_once_however_long_it_is():
    assert structure.repeated_places({"p.a": LINES, "p.b": "y = 1\n" + LINES}) == [("p.a:1", "p.b:2", 8)]
    assert structure.repeated_places({"p.a": LINES + "y = 1\n" + LINES}) == [("p.a:1", "p.a:10", 8)]
    assert structure.repeated_places({"p.a": LINES[:30], "p.b": LINES[:30]}) == []


def test_shared_lines_are_a_percentage_of_the_shorter_file():
    assert structure.shared_percent(["a", " b", "", "b"], ["b", "c", "a", "d"]) == pytest.approx(200 / 3)


def test_the_fields_of_settings_include_those_of_their_bases():
    sources = {"p.a": "class A:\n    x: int\nclass BSettings(A):\n    y: int = 1\n    z = 2\n"}
    assert str(structure.largest_settings(sources)) == "2 (p.a: BSettings)"


def test_a_flag_that_two_classes_declare():
    sources = {"p.a": "class A:\n    x: int = flag(1)\n    y: int = flag(2)", "p.b": "class B:\n    x: int = flag(1)"}
    assert structure.flags_declared_twice(sources) == 1


def test_records_and_settings_are_told_apart():
    frozen = "@dataclass(frozen=True)\nclass"
    sources = {"p.a": f"{frozen} A:\n    x: int\n    y: int\nclass B(NamedTuple):\n    x: int\nclass C:\n    x: int"}
    sources["p.b"] = f"{frozen} DFlags(A):\n    z: int\n    topic: ClassVar[str]\n"
    assert str(structure.largest_record(sources)) == "2 (p.a: A)"
    assert str(structure.largest_settings(sources)) == "3 (p.b: DFlags)"
    assert str(structure.largest_record({"p.a": "class A:\n    x: int"})) == "0 (nowhere: nothing)"


def test_a_parameter_after_a_star_has_no_place():
    sources = {"p.a": "def f(a, b, *, c): ...\nclass A:\n  def g(self, a, b, c): ...\ndef h(a, /, b, *more, **c): ..."}
    assert str(structure.most_positional(sources)) == "3 (p.a: A.g)"


def test_closures_are_of_trainers_contracts_and_what_is_asked_for():
    sources = {
        "training.step1_sft.trainer": "import training.utils.x\ndef f():\n    import training.utils.contracts.rows",
        "training.utils.contracts.rows": "if TYPE_CHECKING: import training.utils.x\n\n",
        "training.utils.contracts.__init__": "",
        "training.utils.x": "\n\n",
    }
    assert structure.closures_table(sources, ["training.utils.x"])[2:] == [
        "| training.step1_sft.trainer | 2 | 5 | 3 | 7 |",
        "| training.utils.contracts.rows | 1 | 2 | 2 | 4 |",
        "| training.utils.x | 1 | 2 | 1 | 2 |",
    ]


def test_a_part_touches_the_rooms_whose_code_has_its_words():
    sources = {
        "training.a.x": "import vllm\n",
        "training.a.y": "Pixels = 1\n",
        "training.b.x": '"""Knows no router."""\n# nor vllm\n',
        "training.b.y": "x = vllm_engine\n",
    }
    table = {row.split(" | ")[0]: row for row in structure.features_table(sources)}
    assert table["| vLLM"] == "| vLLM | 2 | 2 | a 1, b 1 |"
    assert table["| images"] == "| images | 1 | 1 | a 1 |"
    assert table["| routers"] == "| routers | 0 | 0 |  |"


def test_the_program_prints_the_tables_of_a_checkout_it_does_not_import(tmp_path, capsys, monkeypatch):
    for main in structure.MAINS:
        path = tmp_path.joinpath(*main.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text('raise SystemExit("imported")\ndef main(): ...\nclass RunArguments: ...\n')
    monkeypatch.setattr(sys, "argv", ["structure", str(tmp_path)])
    structure.main()
    printed = capsys.readouterr().out
    assert "| lines of training/ | 9 |" in printed
    assert "| lines shared by the mains of step1_sft and step2_dpo | 100 %; 100 % without" in printed
    assert "| training/step1_sft | 1 | 3 | 1 | 0 | 0 |" in printed
