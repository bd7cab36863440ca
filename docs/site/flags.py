"""The reference of flags: a page for each command, from the dataclasses that hold its settings.

A command without such dataclasses shows its `--help`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import types
import typing
from typing import Any

FOLDER = "reference/flags"
# Programs that have no word of the command `threestep`.
OTHERS = {}


def pages() -> dict[str, str]:
    """Return every page by its name, the list of them among it."""
    from threestep.command import commands

    known = {name.replace(" ", "_"): (f"threestep {name}", each.module, each.does) for name, each in commands().items()}
    listed = [f"| [{page}]({page}.md) | `{command}` | {_cell(does)} |" for page, (command, _, does) in known.items()]
    lines = [
        "# Flags",
        "",
        "A page for each command, made from the code. Names are the same in a file for `--config`, without the dashes.",
        "",
        "| page | command | |",
        "| --- | --- | --- |",
        *listed,
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *known,
        "```",
        "",
    ]
    found = {f"{FOLDER}/index.md": "\n".join(lines)}
    for page, (command, module, does) in known.items():
        found[f"{FOLDER}/{page}.md"] = _page_of(command, module, does)
    return found


def groups_of(module: str) -> tuple[type, ...]:
    """Return the dataclasses that hold the settings of a program; none for a program without any."""
    from training.utils.flags.step import known_steps

    programs = {step.program: step.groups for step in known_steps().values()}
    groups = programs.get(module) or getattr(_module(module), "GROUPS", ())
    return tuple(part for group in groups for part in _parts(group))


def _page_of(command: str, module: str, does: str) -> str:
    lines = [f"# {command}", "", f"{does[0].upper()}{does[1:]}.", "", "```text", f"{command} [flags]"]
    if not command.endswith(module):
        lines.append(f"python -m {module} [flags]")
    lines += ["```", ""]
    groups = groups_of(module)
    if not groups:
        return "\n".join([*lines, "```text", _help_of(module).rstrip(), "```", ""])
    lines += ["`--config FILE` reads a YAML file of settings; flags override it.", ""]
    for group in groups:
        lines += _group(group)
    return "\n".join(lines)


def _group(group: type) -> list[str]:
    title = (inspect.getdoc(group) or group.__name__).split("\n")[0].rstrip(".")
    lines = [f"## {_cell(title)}", "", "| flag | default | |", "| --- | --- | --- |"]
    kinds = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        names = [f"--{field.name}", *field.metadata.get("aliases", ())]
        lines.append(
            f"| {' '.join(f'`{name}`' for name in names)} | {_default(field)} | {_cell(field.metadata.get('help', ''))}"
            f"{_values(field, kinds[field.name])} |"
        )
    return [*lines, ""]


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None or value == [] or value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{_cell(' '.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))}`"


def _values(field: Any, kind: Any) -> str:
    """What a flag takes, as the settings' checks have it."""
    from training.utils.flags.flags import VALUES, Range

    values = field.metadata.get(VALUES)
    if isinstance(values, Range):
        return f" *({values})*"
    if values:
        return f" *({', '.join(f'`{_cell(str(value))}`' for value in values)})*"
    plain = [part for part in typing.get_args(kind) if part is not types.NoneType] or [kind]
    word = {bool: "", int: "a whole number", float: "a number"}.get(plain[0], "")
    return f" *({word})*" if word else ""


def _cell(text: str) -> str:
    """Text in a table of Markdown: no bars, no line breaks, no tags."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _parts(group: type) -> list[type]:
    from training.utils.flags import arguments

    return arguments._parts(group)


def _module(program: str) -> Any:
    found = importlib.import_module(program)
    return importlib.import_module(f"{program}.__main__") if hasattr(found, "__path__") else found


def _help_of(program: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        _module(program).main(["--help"])
    return said.getvalue()
