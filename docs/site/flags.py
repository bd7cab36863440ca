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
# The other programs, in the order in which one needs them; the steps come first.
PROGRAMS = (
    "training.all_steps",
    "training.inspect",
    "training.preview",
    "training.new_model",
    "training.chat",
    "training.evaluate",
    "training.step2_reward.evaluate",
    "training.report",
    "training.export",
    "training.utils.data.cache",
)


def pages() -> dict[str, str]:
    """Return every page by its name, the list of them among it."""
    from training.utils.run.step import known_steps

    found: dict[str, str] = {}
    rows = []
    for step in known_steps().values():
        found[f"{FOLDER}/{step.name}.md"] = _page_of(step.program, f"Step {step.number}: {step.title}", step.groups)
        rows.append((step.name, step.program, step.title))
    for program in PROGRAMS:
        name = program.removeprefix("training.").replace(".", "_")
        module = _module(program)
        found[f"{FOLDER}/{name}.md"] = _page_of(program, program, getattr(module, "GROUPS", ()))
        rows.append((name, program, (module.__doc__ or "").strip().split("\n")[0]))
    listed = [f"| [{name}]({name}.md) | `python -m {program}` | {_cell(what)} |" for name, program, what in rows]
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
        *(name for name, _, _ in rows),
        "```",
        "",
    ]
    return {f"{FOLDER}/index.md": "\n".join(lines), **found}


def _page_of(program: str, title: str, groups: Any) -> str:
    lines = [f"# {title}", "", "```text", f"python -m {program} [flags]", "```", ""]
    if not groups:
        return "\n".join([*lines, "```text", _help_of(program).rstrip(), "```", ""])
    lines += ["| | |", "| --- | --- |", "| `--config FILE` | A YAML file of settings; flags override it. |", ""]
    for group in groups:
        for part in _parts(group):
            lines += _group(part)
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
    from training.utils.run.flags import VALUES, Range

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
    from training.utils.run import arguments

    return arguments._parts(group)


def _module(program: str) -> Any:
    found = importlib.import_module(program)
    return importlib.import_module(f"{program}.__main__") if hasattr(found, "__path__") else found


def _help_of(program: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        _module(program).main(["--help"])
    return said.getvalue()
