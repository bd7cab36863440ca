"""What plugins of this project add, for the error where one is not there: `training/utils/plugins/known_plugins.txt`.

python -m tests.support.known_plugins   writes it
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import plugins

# Tables of addresses of entries, which may have flags of their own.
_WITH_FLAGS = ("policy_losses", "advantages", "preference_losses")
KNOWN = Path(__file__).parents[2] / "training" / "utils" / "plugins" / "known_plugins.txt"


def known_plugins() -> str:
    """Return the commands, flags and names in tables of each plugin in `threestep/plugins`, a line each."""
    lines = []
    for name, plugin in plugins().items():
        if not (KNOWN.parents[3] / "threestep" / "plugins" / name / "__init__.py").is_file():
            continue
        places = dict.fromkeys(place for places in plugin.flags.values() for place in places)
        places |= dict.fromkeys(entry.flags for entry in plugin.tables.get("rollout_engines", {}).values())
        groups = [named_object(place) for place in places if place]
        entries = [each for table in _WITH_FLAGS for each in plugin.tables.get(table, {}).values()]
        own = [_own_names(found) for each in entries if (found := getattr(named_object(each), "flags", None))]
        names = [*(field.name for group in groups for field in dataclasses.fields(group)), *itertools.chain(*own)]
        flags = dict.fromkeys(sorted(names))
        kinds = {
            "commands": [command.replace(" ", "_") for command in plugin.commands],
            "flags": flags,
            **plugin.tables,
        }
        lines += [f"{name} {kind}: {' '.join(words)}" for kind, words in kinds.items() if words]
    return "\n".join([*lines, ""])


def _own_names(group: type) -> list[str]:
    """Return the flags that a plugin declares, without those of the core that an entry of its reads too."""
    kinds = [kind for kind in group.__mro__ if kind.__module__.startswith("threestep.plugins.")]
    return [name for kind in kinds for name in vars(kind).get("__annotations__", {})]


if __name__ == "__main__":
    KNOWN.write_text(known_plugins(), encoding="utf-8")
