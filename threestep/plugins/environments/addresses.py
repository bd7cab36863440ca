"""Places of environments, as `--environment` names them: a class of a file or of an installed package, or verifiers.

A package offers environments as entry points of the group threestep.environments:

    [project.entry-points."threestep.environments"]
    Maze = "my_mazes.maze:Maze"
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.environments.driven.verifiers_tasks import PREFIX, check_verifiers
from training.utils.base.errors import ThreestepError, first_line, nearest_names
from training.utils.base.user_files import check_address, is_address, load_function, loaded_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "threestep.environments"
FLAG = "--environment"
_VERIFIERS = "threestep.plugins.environments.driven.verifiers"


def installed_environments() -> dict[str, EntryPoint]:
    """The environments of installed packages by name."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` need not wait for

    return {each.name: each for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)}


def name_of(address: str) -> str:
    """The environment's name, as rows have it in their column."""
    name = address.rpartition(":")[2]
    path = Path(name)
    module = path.parent if path.name == "__init__.py" else path
    return module.stem if address.startswith(PREFIX) else name


def check_environment(address: str) -> None:
    """ThreestepError if there is no such environment. Loads nothing."""
    if address.startswith(PREFIX):
        return check_verifiers(address, FLAG)
    if ":" in address or is_address(address) or address.endswith(".py"):
        check_address(address, FLAG)
        return
    known = installed_environments()
    if address not in known:
        raise ThreestepError(
            f"{FLAG} expects FILE.py:NAME or the name of an installed environment ({', '.join(known) or 'none'}), "
            f"got '{address}'{nearest_names(address, known) if known else ''}"
        )


def load_environment(address: str) -> Callable[[], Any]:
    """Return the class of an environment, or a function that makes one. ThreestepError if it does not load."""
    check_environment(address)
    if address.startswith(PREFIX):
        found: Any = import_module(loaded_name(_VERIFIERS)).environment_of(address.removeprefix(PREFIX))
        return found  # type: ignore[no-any-return]
    if is_address(address):
        return load_function(address, FLAG)
    entry = installed_environments()[address]
    try:
        loaded = entry.load()
    except Exception as problem:
        raise ThreestepError(
            f"{FLAG} {address}: '{entry.value}' does not load: {type(problem).__name__}: {first_line(problem)}"
        ) from problem
    if not callable(loaded):
        raise ThreestepError(f"{FLAG} expects a class, got '{address}', which is of type {type(loaded).__name__}")
    return loaded  # type: ignore[no-any-return]
