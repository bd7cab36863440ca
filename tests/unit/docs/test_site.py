"""The documentation's site: which pages it has, what is made from the code, and (in the long form) the whole build."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import command_lines, pages
from tests.support.imports import imports
from threestep.command import commands
from threestep.plugins.names.deepspeed_chat_flags import ANSWERING_OLD_FLAGS
from training.utils.flags.step import known_steps

ROOT = Path(__file__).parents[3]
SITE = ROOT / "docs" / "site"


def part(name):
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def flag_pages():
    return part("flags").pages()


def test_every_page_has_its_place_in_the_order_of_reading():
    """A page that docs/index.md does not name would be found by search alone; the build fails on it too."""
    gathered = part("pages")
    text = (ROOT / "docs" / "index.md").read_text()
    listed = {(ROOT / "docs" / target).resolve() for target in pages.links(text)}
    missing = [name for name, path in gathered.sources().items() if name != "index.md" and path not in listed]
    assert missing == []


def test_each_plugin_has_a_page_and_the_index_lists_them_by_name_behind_the_core():
    text = (ROOT / "docs" / "index.md").read_text()
    core, section = text.split("\n## Plugins\n")
    listed = re.findall(r"^- \[(\w+)\]\(\.\./threestep/plugins/(\w+)/README\.md\)", section, re.MULTILINE)
    plugins = sorted(path.parent.name for path in ROOT.glob("threestep/plugins/*/__init__.py"))
    assert listed == [(name, name) for name in plugins]
    assert "threestep/plugins" not in core


def test_what_the_modules_import_is_installed_or_mocked():
    """Autodoc imports every module of training: a package of no extra that one needs would fail the build."""
    mocked = re.search(r"^autodoc_mock_imports = \[(.*)\]$", (SITE / "conf.py").read_text(), re.MULTILINE).group(1)
    known = {"training", "threestep", *sys.stdlib_module_names, *re.findall(r'"(\w+)"', mocked)}
    missing = {
        package
        for path in (ROOT / "training").rglob("*.py")
        for found in imports(".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text())
        if found.eager and (package := found.module.split(".")[0]) not in known
        if importlib.util.find_spec(package) is None
    }
    assert missing == set(), "name it in autodoc_mock_imports of docs/site/conf.py"


def test_contents_have_a_section_for_each_that_lists_pages():
    gathered = part("pages")
    text = "# T\n\n## One\n\n- [A](a.md): x\n- [B](b/c.md), and [D](d.md)\n\n## Reference\n\nwords\n\n- [V](v.md)\n"
    made = gathered.with_contents(text, {"reference/flags/index.md": "", "reference/flags/sft.md": ""})
    trees = re.findall(r"```\{toctree\}\n:hidden:\n:caption: (.+)\n\n((?:.+\n)+)```", made)
    assert trees == [("One", "a.md\nb/c.md\nd.md\n"), ("Reference", "v.md\nreference/flags/index.md\n")]


def test_links_between_pages_lead_to_their_copies():
    gathered = part("pages")
    page = ROOT / "training" / "step2_reward" / "README.md"
    names = {path: name for name, path in gathered.sources().items()}

    def copied(text):
        return gathered.with_links(text, page, "steps/reward.md", names)

    assert copied("[step 1](../step1_sft/README.md#data)") == "[step 1](sft.md#data)"
    assert copied("[data](../../docs/data.md)") == "[data](../data.md)"
    assert copied("[the loss](loss.py) and [paper](https://arxiv.org)") == "the loss and [paper](https://arxiv.org)"
    assert copied("[gone](nowhere.md)") == "[gone](nowhere.md)"  # Sphinx reports it
    assert copied("```\n[data](../../docs/data.md)\n```\n") == "```\n[data](../../docs/data.md)\n```\n"


def test_each_command_has_a_page_with_all_its_flags(flag_pages):
    """DeepSpeed-Chat's old names apart, which have a page of their own."""
    old = {flag for step in known_steps().values() for flag in step.old_flags} | {"--help", "--local_rank"}
    old |= ANSWERING_OLD_FLAGS.keys()
    for word, program in commands().items():
        text = flag_pages[f"reference/flags/{word}.md"]
        assert text.startswith(f"# threestep {word}\n")
        assert f"[{word}]({word}.md)" in flag_pages["reference/flags/index.md"]
        known = {flag for flag in command_lines.flags_of(program.module) if re.match(r"--(?!no[_-])\w+$", flag)}
        assert sorted(known - old - set(re.findall(r"--\w+", text))) == [], word


def test_a_flags_row_has_default_values_and_help(flag_pages):
    lines = flag_pages["reference/flags/sft.md"].splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `--") and "`--config" not in line}
    assert rows["--z_loss_coef"].startswith("| `--z_loss_coef` | `0.0` | Weight of the z-loss")
    assert rows["--z_loss_coef"].endswith("*(0 or more)* |")
    assert "`bf16`" in rows["--dtype"] and "`fp16`" in rows["--dtype"]
    cells = {flag: len(re.split(r"(?<!\\)\|", row)) for flag, row in rows.items()}
    assert set(cells.values()) == {5}, cells


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["What it *does*, for `a_b`s and a_."], ["What it \\*does\\*, for ``a_b``\\ s and a\\_.", ""]),
        (["name: what it is", "other: more"], ["| name: what it is", "| other: more", ""]),
        (["As here:", "    code *", "then"], ["As here:", "", "::", "", "        code *", "", "then", ""]),
        (["one `lone backtick"], ["one \\`lone backtick", ""]),
    ],
)
def test_docstrings_are_shown_as_they_stand(lines, expected):
    assert part("docstrings").as_restructured(lines) == expected


def test_modules_are_those_of_the_packages():
    found = part("modules").pages()
    assert ".. automodule:: training.utils.layout.planner\n" in found["reference/modules/training.utils.layout.md"]
    assert ".. automodule:: threestep.command\n" in found["reference/modules/threestep.md"]
    assert "training.utils.layout](training.utils.layout.md)" in found["reference/modules/index.md"]


@pytest.mark.long
def test_the_site_builds_without_a_network(tmp_path):
    """Every warning is an error: no link leads nowhere, no page is left out. What it loads lies beside it."""
    pytest.importorskip("sphinx", reason="Sphinx of the extra `docs` is not installed: bash scripts/docs.sh")
    command = [sys.executable, str(SITE / "build.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    pages_made = list((tmp_path / "site").rglob("*.html"))
    assert len(pages_made) > 80 and (tmp_path / "site" / "searchindex.js").stat().st_size > 100_000
    for page in pages_made:
        text = page.read_text()
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link rel="stylesheet"[^>]* href="([^"]+)"', text
        )
        assert [target for pair in loaded for target in pair if re.match(r"https?:|//", target)] == [], page


@pytest.mark.long
def test_a_broken_link_fails_the_build(tmp_path):
    sphinx = pytest.importorskip("sphinx.cmd.build", reason="Sphinx of the extra `docs` is not installed")
    source = tmp_path / "pages"
    source.mkdir()
    for text, code in (("# T\n\n[a](nowhere.md)\n", 1), ("# T\n\n[a](#t)\n", 0)):
        (source / "index.md").write_text(text)
        words = ["-b", "html", "-q", "-W", "-E", "-c", str(SITE), str(source), str(tmp_path / "out")]
        assert sphinx.build_main(words) == code
