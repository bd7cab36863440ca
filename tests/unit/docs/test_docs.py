"""Every page of the documentation: its commands are asked of the programs, its code compiles, its links lead somewhere.

A block of bash is read by bash with no program in reach (support/pages.py), and every command line that it would start
is parsed by that program's own parser (support/command_lines.py); nothing is run. A block `python NAME.py`, `json NAME`
or `yaml NAME` is a file of the reader's, and lies in the folder where the page's commands are read. Names of modules,
rooms and folders in pages, docstrings and comments are of today (support/names.py). Python is run and data read by
test_docs_blocks.py."""

from __future__ import annotations

import re
import typing

import pytest

from tests.support import command_lines, pages
from tests.support.command_lines import WrongCommand, check_call
from tests.support.names import Names, spans_of_source
from tests.support.pages import HISTORY, ROOT, page_name
from tests.support.sources import modules
from tests.unit.utils.flags.test_help_page import PROGRAMS, UNITS, parts_of
from threestep.command import named
from training.utils.base import user_files
from training.utils.data import registry
from training.utils.flags.flags import TOPICS, UNIT
from training.utils.flags.help_page import entries_of
from training.utils.plugins.registry import topics

PAGES = pages.all_pages()
NOW = [path for path in PAGES if page_name(path) not in HISTORY]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FOLDERS = ("training/", "threestep/", "docs/", "scripts/", "tests/", "examples/", "benchmarks/", ".ci/")
# Flags that the text names and that are not ours.
FOREIGN_FLAGS = {
    *("--aux_loss_coef",),  # OpenRLHF
    *("--cpu", "--multi_gpu", "--num_processes"),  # accelerate
    *(
        "--exclude",
        "--hostfile",
        "--include",
        "--master_addr",
        "--master_port",
        "--module",
        "--num_gpus",
        "--num_nodes",
    ),
    *("--nproc_per_node", "--no-python"),  # torchrun; those before are DeepSpeed's
    *("--logdir", "--require-hashes", "--sign", "--jinja"),  # tensorboard, pip, git, llama.cpp
    *("--apply_chat_template",),  # lm-evaluation-harness
    *(
        "--default-chat-template-kwargs",
        "--speculative-config",
        "--api-key",
        "--max-model-len",
        "--tensor-parallel-size",
    ),
}  # the last line vLLM


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=page_name)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder, a checkout: the repository's files, and names registered by no other test."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    registry.registered_names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(user_files, "_loaded", {})  # a file that is not run again registers nothing again
    return tmp_path


def write_files(text, folder):
    """The files that a page gives its reader."""
    for block in pages.blocks(text):
        if "." in block.label:
            assert not (folder / block.label).is_symlink(), f"{block.label} is a file of the checkout"
            (folder / block.label).write_text(block.content)


# tests/end_to_end/test_write_a_plugin.py runs its own.
@each([path for path in NOW if path.name != "write_a_plugin.md"])
def test_commands_are_what_programs_take(path, reader):
    text = path.read_text()
    write_files(text, reader)
    wrong = []
    for block in pages.blocks(text):
        if block.language != "bash":
            continue
        place = f"{page_name(path)}:{block.line}"
        try:
            calls = pages.calls(block.content, reader)
        except ValueError as problem:
            wrong.append(f"{place}: {problem}")
            continue
        for call in calls:
            try:
                check_call(call)
            except WrongCommand as problem:
                wrong.append(f"{place}: {' '.join(call)}\n    {problem}")
    assert not wrong, "\n".join(wrong)


@each(NOW)
def test_commands_in_the_text_exist(path):
    """`threestep preview` and `bash scripts/test.sh` in a sentence: the program exists, with its flags."""
    wrong = []
    for span in pages.code_spans(path.read_text()):
        match = re.match(r"(?:\w+=\S+ )*(?:python -m ([\w.]+)|bash (\S+)|threestep ([a-z][\w-]*(?: [a-z_]+)?))", span)
        if match is None:
            continue
        if match[2] is not None:
            if not (ROOT / match[2]).is_file():
                wrong.append(f"{span}: there is no {match[2]}")
            continue
        module = named(match[3].split())[1].module if match[3] else match[1]
        if module in command_lines.FOREIGN_MODULES:
            continue
        place = ROOT.joinpath(*module.split("."))
        if not place.with_suffix(".py").is_file() and not (place / "__main__.py").is_file():
            wrong.append(f"{span}: there is no module {module}")
        elif module in command_lines.all_programs():
            missing = set(FLAG.findall(span)) - command_lines.flags_of(module) - {"--help"}
            wrong += [f"{span}: {module} has no flag {flag}" for flag in sorted(missing)]
    assert not wrong, "\n".join(wrong)


@each(NOW)
def test_flags_in_the_text_exist(path):
    known = set(FOREIGN_FLAGS).union(*(command_lines.flags_of(module) for module in command_lines.all_programs()))
    spans = pages.code_spans(path.read_text())
    for span in spans:  # a program of tests or benchmarks, or the script that runs them: its source names its flags
        match = re.match(r"python -m ((?:tests|benchmarks)\.[\w.]+)|\w+ (scripts/test\.sh|docs/site/build\.py)", span)
        if match is not None:
            place = ROOT / match[2] if match[2] else ROOT.joinpath(*match[1].split("."))
            source = place if match[2] else place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            known |= set(FLAG.findall(source.read_text()))
    named = {flag for span in spans for flag in FLAG.findall(span)}
    assert sorted(named - known) == []


def test_extras_are_installed_from_the_checkout():
    """No index has the package, so that `threestep[NAME]` cannot be installed."""
    texts = {page_name(path): path.read_text() for path in NOW} | modules(ROOT / "threestep")
    assert [name for name, text in texts.items() if re.search(r"\bthreestep\[\w+\]['\"` ]", text)] == []
    named_extras = {extra for text in texts.values() for extra in re.findall(r"-e ['\"]?\.\[(\w+)\]", text)}
    known = set(re.findall(r'^        "(\w+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE))
    assert {"liger", "tinker", "verifiers"} <= named_extras <= known


@each(PAGES)
def test_links_lead_somewhere(path):
    broken = []
    for target in pages.links(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if not other.exists():
            broken.append(target)
        elif anchor and anchor not in pages.anchors(other.read_text()):
            broken.append(f"{target}: no heading of that name")
    assert broken == []


@each(NOW)
def test_files_that_are_named_exist(path):
    text = path.read_text()
    given = {block.label for block in pages.blocks(text)}
    missing = []
    for span in pages.code_spans(text):
        name = span.split(":")[0]
        if name.startswith(FOLDERS) and re.fullmatch(r"[\w./*-]+", name):
            if not (ROOT / name).exists() and not any(ROOT.glob(name.rstrip("/"))):
                missing.append(span)
        elif re.fullmatch(r"[a-z_0-9]+(/[a-z_0-9]+)+\.(py|sh|md|yaml|toml)", name) and name not in given:
            if not any(ROOT.glob(f"**/{name}")):
                missing.append(span)
        elif re.fullmatch(r"(training|tests|benchmarks)(\.\w+)+", span):
            if not _is_module_or_in_one(span):
                missing.append(span)
    assert missing == []


def _is_module_or_in_one(name):
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    source = path.parent.with_suffix(".py")
    return source.is_file() and re.search(rf"\b{path.name}\b", source.read_text()) is not None


PACKAGE = {**modules(ROOT / "training"), **modules(ROOT / "threestep")}


@pytest.fixture(scope="module")
def names():
    beside = [modules(ROOT / folder) for folder in ("benchmarks", "docs", "examples", "tests")]
    tops = ("training", "threestep", "benchmarks", "docs", "examples", "scripts", "tests")
    paths = {path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*")}
    return Names({name: text for found in (PACKAGE, *beside) for name, text in found.items()}, paths | set(tops))


def test_pages_name_what_there_is(names):
    dead = {page_name(path): names.dead(pages.code_spans(path.read_text())) for path in NOW}
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


def test_every_unit_and_topic_is_used():
    found = [entry for program in PROGRAMS for entry in entries_of(parts_of(program))]
    assert {topic for topic, _, _ in found} == {*TOPICS, *topics()}
    assert typing.cast(set, {field.metadata.get(UNIT) for _, field, _ in found}) >= UNITS
