"""Flags of the `deepspeed` and `accelerate` launchers behind a script, read as the variables that the scripts take.

DeepSpeed-Chat's lines have them before main.py, where a script's name stands now. A step's program does not know them:
its ranks exist already.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from training.utils.base.console import HOSTFILE_VARIABLE, RANK_FLAGS, RANKS_VARIABLE
from training.utils.base.errors import Mistakes
from training.utils.flags.flags import flag_in

_PROCESSES = "--num_processes"  # TRL's
_VARIABLES = {
    "--num_gpus": RANKS_VARIABLE,
    "--num_accelerators": RANKS_VARIABLE,
    _PROCESSES: RANKS_VARIABLE,
    "--hostfile": HOSTFILE_VARIABLE,
    "--master_addr": "MASTER_ADDR",
    "--master_port": "MASTER_PORT",
}
_GPUS = (
    "chooses hosts and GPUs for `deepspeed`; here, CUDA_VISIBLE_DEVICES=0,1 chooses GPUs and THREESTEP_HOSTFILE "
    "chooses hosts"
)
_REPLACED = {"--include": _GPUS, "--exclude": _GPUS}
_ALL = "-1"  # the launcher's default: every GPU, every host

# What a step's own program says to them.
LAUNCHER_FLAGS = dict.fromkeys(
    (*_VARIABLES, "--num_nodes", *_REPLACED),
    "belongs to the launcher, not to a step's own program; pass it to scripts/step*.sh, or leave it out",
)


def refuse_launcher_flags(words: Sequence[str], known: Collection[str]) -> None:
    """Raise ThreestepError for flags of launchers among the words of a step's own program. known: flags that it has"""
    mistakes = Mistakes()
    for flag in map(flag_in, words):
        mistakes.require(flag in known or flag not in LAUNCHER_FLAGS, f"{flag} {LAUNCHER_FLAGS.get(flag)}")
    mistakes.raise_if_any()


def read_launcher_flags(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str], list[str]]:
    """Return (the other arguments, `environment` with what the launcher's flags say, a line for each of them).

    Raises one ThreestepError for flags that have no variable, lack a value, or contradict the environment.
    """
    mistakes, variables = Mistakes(), dict(environment)
    rest: list[str] = []
    lines: list[str] = []
    words = [*_processes_of_file(arguments), *arguments]
    while words:
        word = words.pop(0)
        flag, has_equals, value = word.partition("=")
        if flag not in LAUNCHER_FLAGS:
            rest.append(word)
            continue
        if not has_equals:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
        variable = _VARIABLES.get(flag)
        if value == "":
            mistakes.add(f"{flag} needs a value, got none")
        elif flag in _REPLACED:
            mistakes.add(f"{flag} {_REPLACED[flag]}")
        elif variable is None:
            mistakes.require(
                value in ("1", _ALL),
                f"{flag} must be 1, got {value}; to use several hosts, list them in a file named by "
                f"{HOSTFILE_VARIABLE} or --hostfile",
            )
        elif value != _ALL:
            known = environment.get(variable, "").strip()
            mistakes.require(
                known in ("", value),
                f"{flag} {value} and {variable}={known} contradict each other; leave one of them out",
            )
            variables[variable] = value
            lines.append(f"{flag} {value} is read as {variable}={value}")
    mistakes.raise_if_any()
    return rest, variables, lines


def _processes_of_file(arguments: Sequence[str]) -> list[str]:
    """TRL's `num_processes` in the file of settings, as a flag, unless the words have it."""
    given = [word.partition("=") for word in arguments]
    if any(flag in (_PROCESSES, *RANK_FLAGS) for flag, _, _ in given):
        return []
    files = [value for flag, equals, value in given if flag == "--config" and equals]
    files += [value for word, value in itertools.pairwise(arguments) if word == "--config"]
    for file in files[-1:]:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # which the step's program tells
            found = re.search(r"^num_processes:\s*(\d+)\s*$", Path(file).read_text(encoding="utf-8"), re.MULTILINE)
            return [_PROCESSES, found[1]] if found else []
    return []
