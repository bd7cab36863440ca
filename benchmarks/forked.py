"""A training run in a fork of a benchmark that has imported what it needs, so that many short runs start at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path


def run_in_fork(name: str, train: Callable[[], None], log: Path) -> None:
    """Run `train` in a child that writes to `log`. Ends the program, with the log's end, if the child fails."""
    child = multiprocessing.get_context("fork").Process(target=_logged, args=(train, log))
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"{name} ended with code {child.exitcode}:\n{log.read_text()[-3000:]}")


def step3(words: Sequence[object]) -> Callable[[], None]:
    """Return what runs step 3 by its command line."""
    return partial(_step3, [str(word) for word in words])


def _step3(words: Sequence[str]) -> None:
    from training.step3_ppo.main import main

    main(words)


def _logged(train: Callable[[], None], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        train()
    except BaseException:  # noqa: BLE001  # told by its log and its code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
