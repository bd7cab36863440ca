"""python -m tests.support.cuda_stand_in.server LIBRARY: pretends, imports everything once, and forks for each case.

Reads a case a line, as JSON: a file, a function of it, its arguments, and files for its result and for what it prints.
Answers each with the exit code of its process.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn


def main() -> None:
    from tests.support.cuda_stand_in.device import pretend

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print as they are imported is no answer
    pretend(Path(sys.argv[1]))
    from deepspeed.accelerator import get_accelerator

    given = dict(os.environ)
    assert get_accelerator().device_name() == "cuda"  # DeepSpeed keeps the first answer
    import tests.support.everything  # noqa: F401  # it asks for the CPU

    os.environ.clear()
    os.environ.update(given)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _become(**json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(file: str, function: str, arguments: list[Any], result: str, said: str) -> NoReturn:
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(handle, number)
    code = 1
    try:
        found = runpy.run_path(file, run_name="case")[function](*arguments)
        Path(result).write_text(json.dumps(found), encoding="utf-8")
        code = 0
    except BaseException:  # noqa: BLE001  # as the interpreter itself
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
