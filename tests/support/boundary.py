"""The boundary between the core and plugins, as rules on source text. See tests.support.house, which lists the rules.

The core is `training` and `threestep` without `threestep.plugins`; a plugin is a folder of that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.imports import circles, imports, inside, plain_name
from tests.support.rooms import distinct, runs_by_itself
from tests.support.sources import declared_flags, tree

PLUGINS = "threestep.plugins"
# Modules of the core that plugins import: what these promise, they keep. One that no plugin needs leaves the list.
PUBLIC_MODULES = frozenset((Path(__file__).parent / "public_modules.txt").read_text(encoding="utf-8").split())
# Of `training/`, and flags that it declares. They shrink, and none grows.
MOST_CORE_LINES = 41_504
MOST_CORE_FILES = 244
MOST_CORE_FLAGS = 167
# Names that plugins add, by the plugin (`python -m tests.support.known_plugins`).
_ADDED = (Path(__file__).parents[2] / "training/utils/plugins/known_plugins.txt").read_text(encoding="utf-8")
_KINDS = ("flags", "rollout_engines", "trackers")
# Names that are words of the language, or of the core, too.
_PLAIN_WORDS = frozenset(("callback", "device", "digests", "environment", "report", "row", "tools"))


def plugin_of(module: str) -> str | None:
    """Return the plugin that a module belongs to, without its tests."""
    parts = module.removeprefix(f"{PLUGINS}.").split(".")
    is_code = module.startswith(f"{PLUGINS}.") and "tests" not in parts and parts[0] != "__init__"
    return parts[0] if is_code else None


def without_tests(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the sources of `threestep` without the tests that lie in plugins."""
    return {
        module: source
        for module, source in sources.items()
        if not (module.startswith(f"{PLUGINS}.") and "tests" in module.split("."))
    }


def is_plugin_program(module: str, source: str) -> bool:
    """True for a module of a plugin that `python -m` runs: it prints what it finds."""
    return plugin_of(module) is not None and runs_by_itself(source)


def core_imports_no_plugin(module: str, source: str) -> list[str]:
    """The core finds plugins by name, and imports none of them, not for annotations either."""
    if inside(module, PLUGINS):
        return []
    return distinct(
        f"{module}:{found.line} imports {found.module}; the core imports no plugin"
        for found in imports(module, source)
        if inside(found.module, PLUGINS)
    )


def plugins_import_what_is_public(sources: Mapping[str, str]) -> list[str]:
    """Plugins import the core's public modules, and a public module is one that they need."""
    problems, used = [], set[str]()
    known = {plain_name(module) for module in sources}
    for module, source in sources.items():
        if plugin_of(module) is None:
            continue
        for found in imports(module, source):
            if not inside(found.module, "training") or found.module not in known:
                continue
            used.add(found.module)
            if found.module not in PUBLIC_MODULES and not _is_package(found.module, sources):
                problems.append(f"{module}:{found.line} imports {found.module}, which is not in public_modules.txt")
    unused = sorted(PUBLIC_MODULES - used) if "training.utils.setup.setup" in sources else []
    return [*distinct(problems), *(f"{each} is in public_modules.txt, and no plugin needs it" for each in unused)]


def plugins_import_what_they_need(sources: Mapping[str, str]) -> list[str]:
    """A plugin imports itself, and the plugins that its PLUGIN names in `needs`, each of which it does import."""
    problems: list[str] = []
    imported: dict[str, set[str]] = {}
    for module, source in sources.items():
        plugin = plugin_of(module)
        if plugin is None:
            continue
        needs = _needs(plugin, sources)
        for found in imports(module, source):
            other = plugin_of(found.module)
            if other in (None, plugin):
                continue
            imported.setdefault(plugin, set()).add(str(other))
            if other not in needs:
                problems.append(f"{module}:{found.line} imports the plugin {other}, which {plugin} does not need")
    for plugin in sorted({each for module in sources if (each := plugin_of(module))}):
        unused = [need for need in _needs(plugin, sources) if need not in imported.get(plugin, ())]
        problems += [f"{plugin} needs {need}, and imports nothing of it" for need in unused]
    return distinct(problems)


def plugins_close_no_circle(sources: Mapping[str, str]) -> list[str]:
    """No plugin needs itself by way of others."""
    names = {each for module in sources if (each := plugin_of(module))}
    return [" -> ".join(circle) for circle in circles({name: set(_needs(name, sources)) & names for name in names})]


def core_names_no_plugin(sources: Mapping[str, str]) -> list[str]:
    """The core has no name for what plugins add: their flags, engines and trackers, in code or messages."""
    lines = (line.partition(": ") for line in _ADDED.splitlines())
    names = {name for head, _, names in lines if head.split(" ")[-1] in _KINDS for name in names.split()}
    pattern = re.compile(rf"(?<![a-z_])({'|'.join(sorted(names - _PLAIN_WORDS))})(?![a-z_])")
    core = {module: source for module, source in sources.items() if inside(module, "training")}
    found = {module: names for module, source in core.items() if (names := set(pattern.findall(_said(source))))}
    return [f"{module} names {', '.join(sorted(found[module]))}" for module in sorted(found)]


def _said(source: str) -> str:
    """Return the names and the texts of a source, without docstrings."""
    found, parsed = [], tree(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        for child in ast.iter_child_nodes(node):
            names = (getattr(child, name, None) for name in ("id", "attr", "arg", "name", "value"))
            found += [name for name in names if isinstance(name, str)]
    return "\n".join(found)


def core_keeps_its_budget(sources: Mapping[str, str]) -> list[str]:
    """The core has at most so many lines, files and flags; who makes it smaller lowers the numbers."""
    core = {module: source for module, source in sources.items() if inside(module, "training")}
    counts = (
        ("lines", sum(source.count("\n") for source in core.values()), MOST_CORE_LINES),
        ("files", len(core), MOST_CORE_FILES),
        ("flags", len(declared_flags(core)), MOST_CORE_FLAGS),
    )
    advice = "make something smaller, or put the option in a plugin"
    return [
        f"training has {count:,} {what}, at most {most:,}; {advice}" for what, count, most in counts if count > most
    ]


def _needs(plugin: str, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the plugins that a PLUGIN names in `needs`."""
    for node in ast.walk(tree(sources.get(f"{PLUGINS}.{plugin}.__init__", ""))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Plugin":
            return next((ast.literal_eval(word.value) for word in node.keywords if word.arg == "needs"), ())
    return ()


def _is_package(module: str, sources: Mapping[str, str]) -> bool:
    """`from training.utils.layout import rows` counts as the folder too; a folder without code is no module."""
    return module not in sources and not tree(sources.get(f"{module}.__init__", "")).body[1:]
