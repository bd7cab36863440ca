"""Imports, helps and runs of another checkout, in a process that has its libraries already: `python checkout_program.py
CHECKOUT MODULES COMMANDS RUNS`, the last three as JSON, as test_without_plugins.py calls it.

It imports the modules and prints each command's help, then runs the lists of words one after the other, each in a fork.
It ends with the first error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

OURS = ("training", "threestep", "tests")
ROOT = Path(__file__).resolve().parents[2]


def forget_this_checkout() -> None:
    """The process may be a fork of one that has imported it (tests/support/forked_programs.py)."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in {ROOT, Path(__file__).parent}]


def import_all(modules: Sequence[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:  # vLLM has an environment of its own
            if (missing.name or "").partition(".")[0] in OURS:
                raise


def show_help(command: str) -> None:
    from threestep.command import main

    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert said.getvalue().startswith("usage"), f"{command} --help says {said.getvalue()!r}"


def run_in_a_fork(words: Sequence[str]) -> int:
    """Return its code."""
    from threestep.command import main

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # the fork ends here in any case
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(checkout: str, modules: str, commands: str, runs: str) -> None:
    forget_this_checkout()
    sys.path.insert(0, checkout)
    import_all(json.loads(modules))
    import training

    assert Path(training.__file__ or "").is_relative_to(checkout)
    for command in json.loads(commands):
        show_help(command)
    gc.collect()
    gc.freeze()  # or a collection in a fork would copy the pages of all that
    for words in json.loads(runs):
        if code := run_in_a_fork(words):
            sys.exit(f"{' '.join(words)} ended with code {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
