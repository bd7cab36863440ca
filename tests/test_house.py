"""The house keeps its rules, and each rule finds what it forbids (a violation is planted for every one).

pytest alone is enough to run it; tests that start a program skip where torch is not installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import boundary, house, rooms, trees
from tests.support.heavy import heavy_modules_after
from tests.support.imports import circles, closure, import_graph, imports
from tests.support.known_plugins import KNOWN, known_plugins
from tests.support.sources import functions, modules
from training.utils.plugins.registry import owner_of

ROOT = Path(__file__).parents[1]
MODULES = modules(ROOT / "training")
FRONT = boundary.without_tests(modules(ROOT / "threestep"))  # and plugins
PLUGINS = {name: source for name, source in FRONT.items() if boundary.plugin_of(name)}
USERS = {**FRONT, **modules(ROOT / "benchmarks"), **modules(ROOT / "examples")}
PROGRAMS = sorted(
    name
    for name, source in {**MODULES, **PLUGINS}.items()
    if rooms.runs_by_itself(source) and "_program(" in source and name != "training.utils.run.launch"
)

starts_a_program = pytest.mark.skipif(
    find_spec("torch") is None, reason="starts a program of the package, and torch is not installed"
)

# rule, module, source that breaks it, source that does not
PLANTED: list[tuple[house.ModuleRule, str, str, str]] = [
    (rooms.rooms_look_down, "training.utils.data.cache.cache", "import training.step1_sft.loss", "import torch"),
    (
        rooms.rooms_look_down,
        "training.utils.data.cache.cache",
        "def f():\n    from training.utils import engine",
        "from training.utils.base.errors import ThreestepError",
    ),
    (rooms.rooms_look_down, "training.utils.data.rows.dataset", "from ..cache import cache", "from . import phases"),
    (rooms.rooms_look_down, "training.utils.data.files.readers", "import training.convert", "import training"),
    (rooms.rooms_look_down, "training.utils.base.seeds", "from ..layout import rows", "from . import errors"),
    (rooms.rooms_look_down, "training.utils.layout.rows", "import training.utils.models", "import torch"),
    (
        rooms.steps_keep_apart,
        "training.step3_ppo.trainer",
        "from training.step1_sft import loss",
        "from training.step3_ppo import losses",
    ),
    (rooms.steps_keep_apart, "training.step2_dpo.loss", "from ..step2_reward import loss", "from . import x"),
    (rooms.steps_keep_apart, "training.step4_new.trainer", "import training.step2_dpo.loss", "import torch"),
    (
        rooms.steps_keep_apart,
        "training.step1_sft.main",
        "import training.step5_newer",
        "import training.utils.base.seeds",
    ),
    (
        rooms.steps_keep_apart,
        "training.step1_sft.main",
        "from training import report",
        "from training import __version__",
    ),
    (
        rooms.step_parts_look_down,
        "training.step3_ppo.experience.experience",
        "from training.step3_ppo.trainer import Trainer",
        "from training.step3_ppo.losses import policy_loss",
    ),
    (
        rooms.step_parts_look_down,
        "training.step3_ppo.trainer",
        "from training.step3_ppo import main",
        "from training.step3_ppo import records",
    ),
    (
        rooms.nobody_imports_a_program,
        "training.step1_sft.main",
        "from training.convert import build",
        "from training import __version__",
    ),
    (
        rooms.nothing_imports_the_front,
        "training.convert",
        "from threestep.command import main",
        "import training",
    ),
    (
        rooms.programs_import_no_step,
        "threestep.result",
        "def f():\n    from training.step3_ppo import scoring",
        "from training.utils.flags.step import known_steps",
    ),
    (
        rooms.third_parties_stay_home,
        "training.step1_sft.trainer",
        "def f():\n    import deepspeed.comm",
        "import transformers",
    ),
    (rooms.third_parties_stay_home, "training.utils.generation.decoding.hf", "from vllm import LLM", "import torch"),
    (
        rooms.maths_needs_torch_alone,
        "training.step3_ppo.advantages.estimators",
        "from transformers import AutoModel",
        "import math\nimport torch.nn.functional as F",
    ),
    (
        rooms.maths_needs_torch_alone,
        "training.step3_ppo.losses",
        "import numpy as np",
        "from training.utils.layout.rows import TokenRows",
    ),
    (
        rooms.maths_needs_torch_alone,
        "training.utils.layout.planner",
        "from training.utils.data.rows.documents import PromptBatch",
        "import numpy as np",
    ),
    (rooms.maths_needs_torch_alone, "training.step1_sft.loss", "import tqdm", "from torch import nn"),
    (
        boundary.core_imports_no_plugin,
        "threestep.result",
        "def f():\n    from threestep.plugins.explain import page",
        "from training.utils.plugins.registry import plugin_module",
    ),
    (house.no_pickles, "training.utils.data.cache.cache", "import pickle", "import pyarrow"),
    (
        house.no_pickles,
        "training.utils.loading.models",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=True)",
    ),
    (house.no_pickles, "training.x", "np.load('x', allow_pickle=True)", "np.load('x', allow_pickle=False)"),
    (house.no_pickles, "training.x", "load(x, trust_remote_code=True)", "load(x, trust_remote_code=flag)"),
    (house.no_pickles, "training.x", "yaml.load(text)", "yaml.safe_load(text)"),
    (house.no_pickles, "training.x", "eval(text)", "model.eval()"),
    (house.no_bags, "training.step3_ppo.utils", "", ""),
    (house.no_bags, "training.utils.data.helpers", "", ""),
    (house.no_bags, "training.utils.__init__", "def f(): ...", '"""Rooms."""'),
    (house.opens_with_a_docstring, "training.x", "import os", '"""What it is."""\nimport os'),
    (house.docstrings_say_what, "training.x", '"""What it is."""', '"""Reading of files, and what they hold."""'),
    (
        house.docstrings_say_what,
        "training.x",
        'class X:\n    def f(self):\n        """Whether it fits."""',
        'class X:\n    def f(self):\n        """True if it fits."""',
    ),
    (house.docstrings_say_what, "training.x", 'class X:\n    """Of a row."""', 'class X:\n    """Offset in a row."""'),
    (house.no_prints, "training.step1_sft.trainer", "print('loss')", "log('loss')"),
    (house.no_bare_except, "training.x", "try: f()\nexcept: pass", "try: f()\nexcept OSError: pass"),
    (
        house.functions_stay_short,
        "training.x",
        "def f():\n    " + "g();" * (house.MOST_STATEMENTS + 1),
        "def f():\n    'What it does.'\n" + "    g()\n" * house.MOST_STATEMENTS,
    ),
    (
        house.functions_stay_short,
        "training.x",
        "class A:\n  def f(self):\n    def g():\n" + "      h()\n" * house.MOST_STATEMENTS,
        "class A:\n  def f(self):\n    def g():\n" + "      h()\n" * (house.MOST_STATEMENTS - 1),
    ),
    (
        house.functions_take_few_parameters,
        "training.x",
        "def f(a, b, c, d, /, e, *f, g, **h): ...\ndef g(a, b, c, d, /, e, *f, g, h, **i): ...",
        "class A:\n  def f(self, a, b, c, d, e, f, g, *, h): ...",
    ),
    (
        house.few_parameters_go_by_place,
        "training.x",
        "class A:\n  def f(self, a, b, /, c, d, e): ...",
        "class A:\n  def f(self, a, b, /, c, d, *, e): ...\ndef g(a, b, c, d, *e, f, **g): ...",
    ),
    (
        house.few_parameters_go_by_place,
        "threestep.plugins.kernels.calls",
        "def noting(module, query, key, value, mask): ...",
        "def _noted():\n  def noting(module, query, key, value, mask): ...",
    ),
    (
        house.masks_come_from_lengths,
        "training.x",
        "mask = batch.input_ids_NT != tokenizer.pad_token_id",
        "same = tokenizer.pad_token_id == tokenizer.eos_token_id",
    ),
]


TEN_FIELDS = "".join(f"    x{number}: int\n" for number in range(house.MOST_FIELDS))
ELEVEN_FIELDS = TEN_FIELDS + "    more: int\n"

# rule, sources that break it, sources that do not
PLANTED_IN_PACKAGES: list[tuple[house.PackageRule, dict[str, str], dict[str, str]]] = [
    (
        rooms.no_import_circles,
        {"a.b": "def f():\n    import a.c", "a.c": "import a.b"},
        {"a.b": "import a.c", "a.c": ""},
    ),
    (rooms.rooms_have_floors, {"training.utils.attic.x": ""}, {"training.utils.base.x": ""}),
    (
        rooms.rooms_have_floors,
        {"training.utils.plugins.x": "import torch"},
        {"training.utils.plugins.x": "from training.utils.base import y", "training.utils.base.y": ""},
    ),
    (
        rooms.imports_find_what_they_name,
        {"a.b": "def f():\n    from a.c import x", "a.c": "y = 1"},
        {"a.b": "def f():\n    from a.c import x\nimport torch", "a.c": "x = 1"},
    ),
    (
        rooms.imports_find_what_they_name,
        {"a.b": "def f():\n    import a.d", "a.c": ""},
        {"a.b": "def f():\n    import a.c", "a.c": ""},
    ),
    (
        rooms.rooms_close_no_circle,
        {
            "training.a.x": "import training.b.x",
            "training.b.x": "",
            "training.b.y": "def f():\n    import training.a.x",
        },
        {"training.a.x": "import training.b.x", "training.b.x": "", "training.b.y": "import training.b.x"},
    ),
    (
        rooms.rooms_stay_small,
        {f"training.a.x{number}": "" for number in range(rooms.MOST_MODULES_OF_A_ROOM + 1)},
        {f"training.a.x{number}": "" for number in range(rooms.MOST_MODULES_OF_A_ROOM)} | {"training.a.__init__": ""},
    ),
    (
        rooms.images_stay_home,
        {"training.utils.layout.x": "def rows_of(pictures): ..."},
        {
            "training.utils.layout.x": "def division(media): ...",
            "threestep.plugins.images.x": "from PIL import Image",
            "training.utils.x.arguments": "image = 1",
        },
    ),
    (
        rooms.contracts_load_little,
        {
            "training.utils.contracts.x": "\n".join(f"import training.y{number}" for number in range(5)),
            **{f"training.y{number}": "" for number in range(5)},
        },
        {
            "training.utils.contracts.x": "if TYPE_CHECKING:\n    import training.y0\nimport training.y1",
            "training.y0": "",
            "training.y1": "",
        },
    ),
    (
        rooms.every_file_serves_somebody,
        {
            "training.utils.x": '"""It is."""\nimport training.utils.y',
            "training.utils.y": '"""It is. Serves extensions."""',
        },
        {"training.utils.x": '"""It is."""', "training.utils.__init__": '"""Each file serves --data_path."""'},
    ),
    (
        rooms.every_file_serves_somebody,
        {"training.x": '"""Does it."""\nif __name__ == "__main__":\n    import training.y', "training.y": "x = 1"},
        {
            "training.x": '"""python -m training.x"""\nif __name__ == "__main__":\n    import training.y',
            "training.y": "x = 1",
        },
    ),
    (
        rooms.every_file_serves_somebody,
        {"training.x": '"""Does it."""\nmain = program(__name__)'},
        {"training.x": '"""python -m training.x"""\nmain = program(__name__)'},
    ),
    (
        boundary.plugins_import_what_is_public,
        {"threestep.plugins.a.x": "import training.utils.attic.y", "training.utils.attic.y": "x = 1"},
        {
            "threestep.plugins.a.x": "from training.utils.plugins import registry",
            "training.utils.plugins.registry": "x = 1",
            "training.utils.plugins.__init__": '"""Plugins."""',
        },
    ),
    (
        boundary.plugins_import_what_they_need,
        {"threestep.plugins.a.x": "from threestep.plugins.b import y", "threestep.plugins.b.y": ""},
        {
            "threestep.plugins.a.x": "from threestep.plugins.b import y",
            "threestep.plugins.a.__init__": "PLUGIN = Plugin('a', 'does', needs=('b',))",
            "threestep.plugins.b.y": "",
        },
    ),
    (
        boundary.plugins_import_what_they_need,
        {"threestep.plugins.a.__init__": "PLUGIN = Plugin('a', 'does', needs=('b',))", "threestep.plugins.b.y": ""},
        {"threestep.plugins.a.__init__": "PLUGIN = Plugin('a', 'does')", "threestep.plugins.b.y": ""},
    ),
    (
        boundary.plugins_close_no_circle,
        {f"threestep.plugins.{a}.__init__": f"PLUGIN = Plugin('{a}', 'does', needs=('{b}',))" for a, b in ("ab", "ba")},
        {f"threestep.plugins.{a}.__init__": f"PLUGIN = Plugin('{a}', 'does', needs=('{b}',))" for a, b in ("ab", "bc")},
    ),
    (
        boundary.core_keeps_its_budget,
        {"training.x": "\n" * (boundary.MOST_CORE_LINES + 1)},
        {"training.x": "\n" * boundary.MOST_CORE_LINES},
    ),
    (
        boundary.core_names_no_plugin,
        {"training.x": 'def f(settings):\n    return settings["rollouts_ahead"], "give --mtp_num_layers 1"'},
        {"training.x": 'def f(flags):\n    """Of --rollouts_ahead."""\n    return flags.queue'},
    ),
    (
        house.class_names_are_used_once,
        {"training.x": "class Piece: ...", "training.y": "def f():\n    class Piece: ..."},
        {"training.x": "class Piece: ...", "training.y": "class Pieces: ...\nPiece = 1"},
    ),
    (
        house.flags_are_declared_once,
        {"training.x": "class A:\n    rate: float = flag(1.0)", "training.y": "class B:\n    rate: int = x.flag(2)"},
        {"training.x": "class A:\n    rate: float = flag(1.0)", "training.y": "class B:\n    rate: float = flag_of(A)"},
    ),
    (
        house.flags_are_declared_once,
        {"training.x": "class A:\n    rate: float = flag(1.0)", "training.y": "FLAGS = (('rate', float, flag(1.0)),)"},
        {"training.x": "class A:\n    rate: float = flag(1.0)", "training.y": "FLAGS = (('ratio', float, flag(1.0)),)"},
    ),
    (
        house.records_stay_small,
        {
            "training.x": "class Base(typing.NamedTuple):\n    y: int",
            "training.y": f"@dataclass(frozen=True)\nclass Piece(Base):\n{TEN_FIELDS}",
        },
        {
            "training.x": f"class Piece:\n{ELEVEN_FIELDS}",
            "training.y": f"@dataclass(frozen=True)\nclass PieceArguments:\n{ELEVEN_FIELDS}",
            "training.z": "@dataclass(frozen=True)\nclass One(Base):\n    x: int\n    y: ClassVar[int]",
        },
    ),
    (
        house.records_stay_small,
        {"training.x": f"@dataclass(frozen=True)\nclass {house.LARGE_RECORDS[0]}:\n    x: int"},
        {"training.x": f"@dataclass(frozen=True)\nclass {house.LARGE_RECORDS[0]}:\n{ELEVEN_FIELDS}"},
    ),
]


@pytest.mark.parametrize("rule", house.MODULE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule):
    checked = {**MODULES, **(PLUGINS if rule is house.no_prints else FRONT)}  # the command prints
    checked |= modules(ROOT / "examples") if rule is house.no_pickles else {}
    problems = [problem for module, source in checked.items() for problem in rule(module, source)]
    assert not problems, "\n".join([rule.__doc__ or rule.__name__, *problems])


@pytest.mark.parametrize("rule", house.PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_as_a_whole(rule):
    with_users = rule in (rooms.every_file_serves_somebody, rooms.imports_find_what_they_name)
    problems = rule({**MODULES, **(USERS if with_users else PLUGINS)})
    assert not problems, "\n".join([rule.__doc__ or rule.__name__, *problems])


@pytest.mark.parametrize(
    ("rule", "module", "broken", "kept"), PLANTED, ids=[f"{row[0].__name__}-{row[1]}" for row in PLANTED]
)
def test_a_planted_violation_is_found(rule, module, broken, kept):
    assert len(rule(module, broken)) == 1
    if broken != kept:
        assert rule(module, kept) == []


@pytest.mark.parametrize(
    ("rule", "broken", "kept"), PLANTED_IN_PACKAGES, ids=[row[0].__name__ for row in PLANTED_IN_PACKAGES]
)
def test_a_violation_planted_in_a_package_is_found(rule, broken, kept):
    assert len(rule(broken)) == 1
    assert rule(kept) == []


def test_every_rule_has_a_violation_planted():
    assert {row[0] for row in PLANTED} == set(house.MODULE_RULES)
    assert {row[0] for row in PLANTED_IN_PACKAGES} == set(house.PACKAGE_RULES)


def test_functions_that_libraries_call_are_there():
    sources = {**MODULES, **FRONT}
    known = {f"{module} {name}" for module, source in sources.items() for name, _, _ in functions(source)}
    there = {None, *map(boundary.plugin_of, FRONT)}
    listed = [each for each in house.CALLED_BY_LIBRARIES if boundary.plugin_of(each.partition(" ")[0]) in there]
    gone = [name for name in listed if name not in known]
    assert not gone, f"take these off CALLED_BY_LIBRARIES in tests/support/house.py: {gone}"


def test_small_programs_may_print():
    assert house.no_prints("training.convert", "print('x')") == []
    assert house.no_prints("training.utils.run.launch", "print('x')") == []


def test_unit_tests_name_a_module_or_a_room():
    problems = house.unmirrored(ROOT / "tests" / "unit", ROOT / "training")
    for tests in (ROOT / "threestep" / "plugins").glob("*/tests"):
        problems += house.unmirrored(tests, tests.parent)
    assert not problems, "\n".join(problems)


def test_a_test_out_of_place_and_an_untested_room_are_found(tmp_path):
    modules = ("a/one.py", "b/two.py", "c/three.py", "c/d/four.py", "c/d/e/five.py", "f/six.py")
    tests = (
        "a/test_one.py",
        "a/test_one_more.py",
        "a/test_three.py",
        "test_two.py",
        "c/test_d.py",
        "test_five_more.py",
    )
    for name in (*(f"training/{module}" for module in modules), *(f"unit/{test}" for test in tests)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert house.unmirrored(tmp_path / "unit", tmp_path / "training") == [
        "a/test_three.py tests no module of training/a",
        "training/f has no test in tests/unit",
    ]


def test_the_package_keeps_to_the_tree_of_the_design():
    problems = trees.tree_problems(trees.tree_of((ROOT / "docs" / "design.md").read_text(encoding="utf-8")), ROOT)
    assert not problems, "\n".join(problems)


def test_planted_rooms_that_a_tree_lacks_or_makes_up_are_found(tmp_path):
    for name in ("training/step1_sft/main.py", "training/utils/base/seeds.py", "training/convert.py", "setup.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    tree = """
setup.py  LICENSE    the package
training/            all of it
  step1_sft/         one step: main  loss
  attic/             old things
  convert.py         a program
"""
    assert trees.named_paths(tree) == [
        "setup.py", "LICENSE", "training/", "training/step1_sft/", "training/attic/", "training/convert.py"
    ]  # fmt: skip
    assert trees.tree_problems(tree, tmp_path) == [
        "there is no LICENSE",
        "there is no training/attic/",
        "training/utils/base/ is not in the tree",
    ]
    assert trees.tree_problems("training/\n  step1_sft/   a step\n  utils/\n    base/  more\n", tmp_path) == []


@pytest.mark.parametrize("package", ["training", "threestep", "threestep.command"])
def test_importing_the_package_is_cheap(package):
    heavy, seconds, _ = heavy_modules_after(f"import {package}")
    assert heavy == []
    assert seconds < 1


@starts_a_program
def test_a_heavy_import_is_seen():
    assert heavy_modules_after("import torch")[0][0] == "torch"


@starts_a_program
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_quick_and_loads_nothing_heavy(program):
    heavy, seconds, said = heavy_modules_after(
        f"""
import runpy, sys
sys.argv = ["main", "--help"]
try:
    runpy.run_module("{program}", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
"""
    )
    assert any(flag in said for flag in ("--config", "--out", "--part", "--data_output_path"))
    assert heavy == []
    assert seconds < 4  # of CPU; a second or two on a machine with nothing else to do


def needed_packages(start, sources):
    """Return the packages beside the standard library and `sources` that loading the modules of `start` imports."""
    graph = import_graph(sources, eager_alone=True)
    loaded = set().union(*(closure(graph, module) for module in start))
    tops = {
        found.module.split(".")[0] for module in loaded for found in imports(module, sources[module]) if found.eager
    }
    return tops - sys.stdlib_module_names - {module.split(".")[0] for module in sources}


def test_these_tests_need_pytest_alone():
    start = ["conftest", "tests.test_house"]
    support = {name: source for name, source in modules(ROOT / "tests").items() if name.startswith("tests.support")}
    of_start = {name: ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text() for name in start}
    assert needed_packages(start, {**MODULES, **FRONT, **support, **of_start}) == {"pytest", "packaging"}


def test_a_package_that_a_module_below_needs_is_found():
    sources = {"a.x": "import os\nimport a.y", "a.y": "import psutil\ndef f():\n    import numpy"}
    assert needed_packages(["a.x"], sources) == {"psutil"}


def test_the_list_of_what_plugins_add_is_up_to_date():
    assert KNOWN.read_text(encoding="utf-8") == known_plugins(), "run python -m tests.support.known_plugins"


def test_the_plugin_of_an_unknown_name_is_named_where_it_is_not_there(monkeypatch):
    assert owner_of("commands", "audit_explain") is None
    monkeypatch.setattr("training.utils.plugins.registry.plugins", lambda: {})
    assert owner_of("commands", "audit_explain") == "explain"
    assert owner_of("flags", "explain") is None


# Import graphs of packages of a few lines: what the rules on imports stand on.

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
