"""Plugins: optional features, each in a package of its own, and what they add to the programs.

A plugin is a folder in `threestep/plugins`, beside this package, or an installed package that declares an entry point
of the group `threestep.plugins`. Either has a `PLUGIN`. The list is read when a program needs it, so a plugin's own
package
must be cheap to import: what it adds is named by its address, and imported when it is used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from training.utils.base.console import note
from training.utils.base.errors import ThreestepError

GROUP = "threestep.plugins"
_FOLDER = Path(__file__).resolve().parents[3].joinpath(*GROUP.split("."))

# Who starts a command's ranks: the launcher; the command, which is told by a variable; nobody, there is one.
LAUNCHED, HANDED_ON, ALONE = "launched", "handed on", "alone"


@dataclass(frozen=True)
class Command:
    """A word of `threestep`.

    module: as `python -m` takes it. does: for the list of commands
    takes_ranks: LAUNCHED, HANDED_ON or ALONE
    ranks: by default, where they are LAUNCHED; None: one for each visible GPU, or one
    flags: that stand before the user's
    """

    module: str
    does: str
    takes_ranks: str = ALONE
    ranks: int | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plugin:
    """An optional feature.

    does: for the list of plugins. needs: plugins that it imports, by name
    commands: by their words
    """

    name: str
    does: str
    needs: tuple[str, ...] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)


@functools.cache
def plugins() -> Mapping[str, Plugin]:
    """Return every plugin that is there, by name, in the order of the names.

    One that does not load, or needs another that is not there, is left out, with one line that says so. ThreestepError
    if two have the same name, or add the same command.
    """
    found: dict[str, Plugin] = {}
    for name, place, load in _places():
        try:
            plugin = load()
        except Exception as problem:  # noqa: BLE001 - a foreign package may fail in any way
            note(f"the plugin '{name}' is left out: {place} does not load: {type(problem).__name__}: {problem}")
            continue
        if not isinstance(plugin, Plugin):
            note(f"the plugin '{name}' is left out: {place} is {plugin!r}, not a Plugin")
        elif plugin.name in found:
            raise ThreestepError(f"two plugins have the name '{plugin.name}', one of them of {place}; uninstall one")
        else:
            found[plugin.name] = plugin
    found = _with_their_needs(found)
    _check_commands(found)
    return {name: found[name] for name in sorted(found)}


def plugin_module(plugin: str, module: str) -> Any:
    """Return a module of a plugin of this project. ThreestepError if the plugin is not there."""
    if plugin not in plugins():
        raise ThreestepError(f"this needs the plugin '{plugin}', which is not installed: {GROUP}.{plugin}")
    return importlib.import_module(f"{GROUP}.{plugin}.{module}")


def _places() -> Iterator[tuple[str, str, Any]]:
    """Yield a name, an address, and what loads the PLUGIN of it."""
    for path in sorted(_FOLDER.glob("*/__init__.py")):
        module = f"{GROUP}.{path.parent.name}"
        yield path.parent.name, module, functools.partial(_plugin_of, module)
    for point in _entry_points():
        yield point.name, point.value, point.load


def _plugin_of(module: str) -> Any:
    return importlib.import_module(module).PLUGIN


def _entry_points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _with_their_needs(found: Mapping[str, Plugin]) -> dict[str, Plugin]:
    """Return the plugins without those that need one that is not among them."""
    missing = {name: need for name, each in found.items() for need in each.needs if need not in found}
    for name, need in missing.items():
        note(f"the plugin '{name}' is left out: it needs the plugin '{need}', which is not installed")
    kept = {name: each for name, each in found.items() if name not in missing}
    return _with_their_needs(kept) if missing else kept


def _check_commands(found: Mapping[str, Plugin]) -> None:
    owners: dict[str, str] = {}
    for plugin in found.values():
        for word in plugin.commands:
            if word in owners:
                raise ThreestepError(
                    f"the plugins '{owners[word]}' and '{plugin.name}' both add the command '{word}'; uninstall one"
                )
            owners[word] = plugin.name
