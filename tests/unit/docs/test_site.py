"""The documentation's site: which pages it has, what is made from the code, and (in the long form) the whole build."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import command_lines
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


def test_each_command_has_a_page_with_all_its_flags(flag_pages):
    """DeepSpeed-Chat's old names apart, which have a page of their own."""
    old = {flag for step in known_steps().values() for flag in step.old_flags} | {"--help", "--local_rank"}
    old |= {flag for step in known_steps().values() for flag in step.set_aside}
    old |= ANSWERING_OLD_FLAGS.keys()
    for word, program in commands().items():
        page = word.replace(" ", "_")
        text = flag_pages[f"reference/flags/{page}.md"]
        assert text.startswith(f"# threestep {word}\n")
        assert f"[{page}]({page}.md)" in flag_pages["reference/flags/index.md"]
        known = {flag for flag in command_lines.flags_of(program.module) if re.match(r"--(?!no[_-])\w+$", flag)}
        assert sorted(known - old - set(re.findall(r"--\w+", text))) == [], word


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
