"""Plugins: optional features, each in a package of its own, and what they add to the programs.

A plugin is a folder in `threestep/plugins`, beside this package, or an installed package that declares an entry point
of the group `threestep.plugins`. Either has a `PLUGIN`. Programs read all of them when they start, so a plugin's own
package must be cheap to import: it names what it adds by address, and that is imported when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.utils.base.console import note
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.plugins.plugin import EVERY_STEP, TABLES, Hooks, Plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from training.utils.base.errors import Mistakes

Given = TypeVar("Given")
GROUP = "threestep.plugins"
_HERE = Path(__file__).resolve().parent
_FOLDER = _HERE.parents[2].joinpath(*GROUP.split("."))


@functools.cache
def plugins() -> Mapping[str, Plugin]:
    """Return every installed plugin by name, in the order of the names.

    One that does not load, or needs another that is not there, is left out, with one line that says so. ThreestepError
    if two have the same name.
    """
    found: dict[str, Plugin] = {}
    for name, place, load in _places():
        try:
            plugin = load()
        except Exception as problem:  # noqa: BLE001 - a foreign package may fail in any way
            note(f"the plugin '{name}' is disabled: {place} cannot be loaded: {type(problem).__name__}: {problem}")
            continue
        if not isinstance(plugin, Plugin):
            note(f"the plugin '{name}' is disabled: {place} is {plugin!r}, not a Plugin")
        elif unknown := plugin.tables.keys() - TABLES:
            note(
                f"the plugin '{name}' is disabled: it adds to {', '.join(sorted(unknown))}, but the only tables are "
                f"{', '.join(sorted(TABLES))}"
            )
        elif plugin.name in found:
            raise ThreestepError(f"two plugins are named '{plugin.name}', one of them from {place}; uninstall one")
        else:
            found[plugin.name] = plugin
    found = _with_their_needs(found)
    return {name: found[name] for name in sorted(found)}


def added(table: str, known: Iterable[str]) -> dict[str, Any]:
    """Return what plugins add to a table of the core, by name. table: `commands`, or one of `Plugin.tables`. known: the
    core's own names.

    ThreestepError for a name that the core or another plugin has.
    """
    found: dict[str, Any] = {}
    owners = dict.fromkeys(known, "the core")
    for plugin in plugins().values():
        for name, entry in (plugin.commands if table == "commands" else plugin.tables.get(table, {})).items():
            if name in owners:
                raise ThreestepError(
                    f"the plugin '{plugin.name}' adds '{name}' to {table.replace('_', ' ')}, but so does "
                    f"{owners[name]}; uninstall one"
                )
            owners[name], found[name] = f"the plugin '{plugin.name}'", entry
    return found


def one_at_most(found: Iterable[tuple[str, Given]], what: str, each: str) -> Given | None:
    """Return the only entry of `found`, pairs of a name for errors and a value; None without any.
    Raise ThreestepError for several: "`what`, but NAMES `each`; remove one"."""
    pairs = list(found)
    if len(pairs) > 1:
        raise ThreestepError(f"{what}, but {' and '.join(name for name, _ in pairs)} {each}; remove one")
    return pairs[0][1] if pairs else None


def asked_for(table: str, settings: Mapping[str, Any], what: str) -> tuple[str, str | None]:
    """Return the flag that is given of those in a table, and its address; ("", None) without one. Several flags may
    have the same address. settings: by the flags' names.

    ThreestepError where flags of several addresses are given: `what`, and these flags each name one.
    """
    given = {place: name for name, place in added(table, ()).items() if settings.get(name) is not None}
    found = ((f"--{name}", (name, place)) for place, name in given.items())
    return one_at_most(found, what, "each name one") or ("", None)


def flag_groups(step: str) -> dict[str, type]:
    """Return the dataclasses of flags that plugins add to a step, or to another program, by names that a record's
    fields can have."""
    found = {}
    for plugin in plugins().values():
        of_every_step = plugin.flags.get(EVERY_STEP, ()) if step.startswith("step") else ()
        for place in (*of_every_step, *plugin.flags.get(step, ())):
            group = named_object(place)
            found[f"{plugin.name}_{group.__name__}"] = group
    return found


def topics() -> dict[str, str]:
    """Return the topics of plugins' flags, with their titles."""
    return {name: title for plugin in plugins().values() for name, title in plugin.topics.items()}


def hooks(name: str) -> list[Callable[..., Any]]:
    """Return the functions of all plugins for one of the `Hooks` or `ProgramHooks`: by the plugins' names, but after
    those of plugins that a plugin needs."""
    kind = "hooks" if name in Hooks._fields else "program_hooks"
    places = (getattr(getattr(plugins()[plugin], kind), name) for plugin in _after_their_needs(plugins()))
    return [named_object(place) for place in places if place]


def check_by_plugins(flags: Any, mistakes: Mistakes) -> None:
    """Note conflicts between a step's settings that plugins report (`Hooks.check`)."""
    for check in hooks("check"):
        check(flags, mistakes)


def own_forwards(flags: Any) -> list[str]:
    """Return why steps must read and learn in forwards of their own, by plugins (`StepNeeds`)."""
    return [why for needs in hooks("step_needs") if (why := needs(flags).own_forwards)]


def flag_names(program: str) -> dict[str, Any]:
    """Return other programs' flags that a program reads, of all plugins."""
    addresses = (plugin.other_names.flags.get(program) for plugin in plugins().values())
    return {flag: how for address in addresses if address for flag, how in named_object(address).items()}


def read_other_names(
    settings: Sequence[str], words: Sequence[str], table: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """Return the words of a file and those that were typed by the names of flags here, and a line for each flag of
    another program that was read so. table: of `flag_names`"""
    lines: list[str] = []
    for place in (plugin.other_names.reads for plugin in plugins().values()):
        if place:
            settings, words, more = named_object(place)(settings, words, table)
            lines += more
    return [*settings], [*words], lines


def launcher_readers() -> list[Callable[..., Any]]:
    """Return what reads flags of other programs' launchers, of all plugins."""
    return [named_object(plugin.other_names.launcher) for plugin in plugins().values() if plugin.other_names.launcher]


def foreign_runs() -> list[Any]:
    """Return the modules that read another program's flags as the file of `threestep all`."""
    return [named_object(plugin.other_names.run) for plugin in plugins().values() if plugin.other_names.run]


def owner_of(kind: str, name: str, by_beginning: bool = False) -> str | None:
    """Return the plugin of this project that would add a name, if it is not installed; otherwise None.

    kind: as of `missing`. by_beginning: what plugins add are beginnings of names
    """
    names = missing(kind)
    return next((names[each] for each in names if name == each or (by_beginning and name.startswith(each))), None)


def missing(kind: str) -> dict[str, str]:
    """Return the names that plugins of this project would add but that are not installed, with those plugins' names.

    kind: `commands`, `flags` or one of `Plugin.tables`
    """
    lines = (_HERE / "known_plugins.txt").read_text(encoding="utf-8").splitlines()
    found = (line.partition(f" {kind}: ") for line in lines)
    return {name: plugin for plugin, _, words in found if plugin not in plugins() for name in words.split()}


def owner_sentence(kind: str, name: str, by_beginning: bool = False) -> str:
    """Return the end of a sentence on an unknown name that a plugin of this project would add; "" for others. kind,
    by_beginning: as of `owner_of`"""
    plugin = owner_of(kind, name, by_beginning)
    return f"; it belongs to the plugin '{plugin}', which is not installed" if plugin else ""


def missing_plugin(kind: str, name: str) -> str:
    """Return the end of a sentence about a plugin that is needed but not installed. kind, name: see `owner_of`."""
    plugin = owner_of(kind, name)
    if plugin is None:
        return f"no installed plugin adds '{name}' to {kind}"
    return f"this needs the plugin '{plugin}', which is not installed ({GROUP}.{plugin})"


def check_plugin(plugin: str, user: str) -> None:
    """Raise ThreestepError if a plugin of this project is not installed. user: the flag or feature that needs it."""
    if plugin not in plugins():
        raise ThreestepError(f"{user} needs the plugin '{plugin}', which is not installed ({GROUP}.{plugin})")


def plugin_module(plugin: str, module: str) -> Any:
    """Return a module of a plugin of this project. ThreestepError if the plugin is not there."""
    check_plugin(plugin, "this")
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
    if not any(map(_declares_some, sys.path)):
        return []
    from importlib.metadata import entry_points

    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _declares_some(folder: str) -> bool:
    """True where a package in a folder of the search path declares an entry point of ours. To import importlib.metadata
    and to ask it takes 45 ms, which every `--help` would wait for; this takes 2."""
    section = f"[{GROUP}]".encode()
    for about in (*Path(folder).glob("*.dist-info"), *Path(folder).glob("*.egg-info")):
        with contextlib.suppress(OSError):
            if section in (about / "entry_points.txt").read_bytes():
                return True
    return False


def _after_their_needs(found: Mapping[str, Plugin]) -> list[str]:
    """Return the names in an order in which each plugin comes after those that it needs."""
    ordered: dict[str, None] = {}
    seen: set[str] = set()

    def add(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for need in found[name].needs:
                add(need)
            ordered[name] = None

    for name in found:
        add(name)
    return [*ordered]


def _with_their_needs(found: Mapping[str, Plugin]) -> dict[str, Plugin]:
    """Return the plugins without those that need one that is not among them."""
    missing = {name: need for name, each in found.items() for need in each.needs if need not in found}
    for name, need in missing.items():
        note(f"the plugin '{name}' is disabled: it needs the plugin '{need}', which is not installed")
    kept = {name: each for name, each in found.items() if name not in missing}
    return _with_their_needs(kept) if missing else kept
