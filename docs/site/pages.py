"""The pages of the site: Markdown of the checkout, in the order of docs/index.md, with links between pages of the site.

docs/index.md names every page, section by section; a page that it does not name fails the build. Sphinx gets a folder
of copies, in which a link to another page leads to that page's copy.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Pages that lie elsewhere than in docs/, by the name of their copy.
ELSEWHERE = {
    "steps/sft.md": "training/step1_sft/README.md",
    "steps/reward.md": "training/step2_reward/README.md",
    "steps/dpo.md": "training/step2_dpo/README.md",
    "steps/ppo.md": "training/step3_ppo/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


def sources() -> dict[str, Path]:
    """Every page by the name of its copy; a plugin's stand in its folder."""
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}
    of_plugins = {_name_of_plugin(path): path for path in ROOT.glob("threestep/plugins/*/*.md")}
    return {**pages, **{name: ROOT / place for name, place in ELSEWHERE.items()}, **of_plugins}


def _name_of_plugin(path: Path) -> str:
    plugin = path.parent.name
    return f"plugins/{plugin}.md" if path.name == "README.md" else f"plugins/{plugin}/{path.name}"


def gather(folder: Path, generated: Mapping[str, str]) -> None:
    """Write the copies and the generated pages into `folder`. generated: text by name."""
    copies = sources()
    names = {path: name for name, path in copies.items()}
    for name, path in copies.items():
        text = with_links(path.read_text(encoding="utf-8"), path, name, names)
        if name == "index.md":
            text = with_contents(text, generated)
        _write(folder / name, text)
    for name, text in generated.items():
        _write(folder / name, text)
    for picture in (ROOT / "docs").glob("*.png"):
        shutil.copy(picture, folder / picture.name)
    for picture in ROOT.glob("threestep/plugins/*/*.png"):  # of a README.md, which is plugins/NAME.md
        shutil.copy(picture, folder / "plugins" / picture.name)


def with_links(text: str, path: Path, name: str, names: Mapping[Path, str]) -> str:
    """Return the page `path` as its copy `name`. A link to a file that is no page of the site becomes its words."""

    def link(match: re.Match[str]) -> str:
        is_picture, words, target = match.groups()
        place, _, anchor = target.partition("#")
        if is_picture or not place or re.match(r"[a-z]+:", target):
            return match[0]
        other = (path.parent / place).resolve()
        if other not in names:
            return words if other.exists() else match[0]  # what does not exist is for Sphinx to report
        relative = os.path.relpath(names[other], os.path.dirname(name) or ".")
        return f"[{words}]({relative}{'#' * bool(anchor)}{anchor})"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, text[end:])])


def with_contents(text: str, generated: Mapping[str, str]) -> str:
    """Return the first page with a table of contents: a section of it for each section that lists pages."""
    sections = _SECTION.split(text)[1:]
    trees = []
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        listed = [match[3] for match in _LINK.finditer(body) if match[3].endswith(".md")]
        if title == "Reference":
            listed += [name for name in generated if name.endswith("index.md")]
        if listed:
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *listed, "```", ""]))
    return text + "\n" + "\n".join(trees)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
