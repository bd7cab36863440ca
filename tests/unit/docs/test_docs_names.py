"""Names of modules, rooms and folders in pages, docstrings and comments are of today (tests/support/names.py)."""

from __future__ import annotations

import pytest

from tests.support import pages
from tests.support.names import Names, spans_of_source
from tests.support.pages import HISTORY, ROOT, page_name
from tests.support.sources import modules

PACKAGE = {**modules(ROOT / "training"), **modules(ROOT / "threestep")}
PAGES = {page_name(path): path.read_text() for path in pages.all_pages() if page_name(path) not in HISTORY}


@pytest.fixture(scope="module")
def names():
    beside = [modules(ROOT / folder) for folder in ("benchmarks", "docs", "examples", "tests")]
    tops = ("training", "threestep", "benchmarks", "docs", "examples", "scripts", "tests")
    paths = {path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*")}
    return Names({name: text for found in (PACKAGE, *beside) for name, text in found.items()}, paths | set(tops))


def test_pages_name_what_there_is(names):
    dead = {page: names.dead(pages.code_spans(text)) for page, text in PAGES.items()}
    assert {page: found for page, found in dead.items() if found} == {}


def test_docstrings_and_comments_name_what_there_is(names):
    dead = {module: names.dead(spans_of_source(source)) for module, source in PACKAGE.items()}
    assert {module: found for module, found in dead.items() if found} == {}


@pytest.mark.parametrize(
    ("alive", "dead"),
    [
        ("layout.blocks", "layout.entries"),
        ("layout.blocks.find_blocks()", "layout.blocks.find_block"),
        ("utils/layout", "utils/run/old_flags"),
        ("layout/blocks.py", "layout/series.py"),
        ("layout/", "rollout/"),
        ("plan.rows", "plan.columns"),
        ("torch.compile", "training.utils.models"),
        ("rollout/kl", "layout/blocks/rows"),
    ],
)
def test_a_dead_name_is_found(alive, dead):
    sources = {
        "training.utils.layout.blocks": "def find_blocks(): ...",
        "training.utils.layout.plan": "class Plan:\n    rows: int\n",
        "training.utils.layout.__init__": "",
    }
    names = Names(sources, ["training", "training/utils", "training/utils/layout"])
    assert names.dead([alive, dead]) == [dead]


def test_names_of_a_source_stand_in_docstrings_and_comments():
    source = '"""See `a.b`."""\nx = "`c.d`"  # as `e.f`\ndef g():\n    """`h`"""\n'
    assert list(spans_of_source(source)) == ["a.b", "h", "e.f"]
