"""The caller's process as it was before a run: a run sets what a program may set for itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator

from training.utils.base.seeds import random_state_kept

_BARS = {
    "transformers.utils.logging": "progress_bar",
    "datasets.utils.tqdm": "progress_bars",
    "huggingface_hub.utils.tqdm": "progress_bars",
}


@contextlib.contextmanager
def callers_state() -> Iterator[None]:
    """Restore the caller's hooks of errors, signal handlers, environment variables, search path, log levels, warning
    filters, random generators and settings of torch at the end."""
    with contextlib.ExitStack() as kept:
        kept.enter_context(warnings.catch_warnings())  # first: the imports of others add filters too
        kept.enter_context(_hooks())
        kept.enter_context(_environment())
        kept.enter_context(_logging())
        kept.enter_context(_bars())
        kept.enter_context(_torch())
        kept.enter_context(random_state_kept())
        yield


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    # torch's process group puts its own excepthook before the caller's, and leaves it there (torch 2.13).
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    path, arguments = list(sys.path), list(sys.argv)
    is_main = threading.current_thread() is threading.main_thread()
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}) if is_main else []
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        sys.path[:], sys.argv[:] = path, arguments
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:  # None: set by no Python code
                signal.signal(number, handler)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    from training.utils.engine.ranks.startup import QUIETED_LOGGERS

    known = [name for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)]
    names = dict.fromkeys([*QUIETED_LOGGERS, "transformers", *known])
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names} | {
        logging.root: logging.root.level
    }
    raises, disabled = logging.raiseExceptions, logging.root.manager.disable
    try:
        yield
    finally:
        logging.raiseExceptions = raises
        logging.disable(disabled)
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def silent_bars() -> Iterator[None]:
    """Show no bars of transformers ("Loading weights", ...) and datasets inside, as far as they are imported."""
    with _bars():
        for module, _, switch in _known_bars():
            getattr(module, f"disable_{switch}")()
        yield


@contextlib.contextmanager
def _bars() -> Iterator[None]:
    """Restore whether libraries show bars; those that are imported inside show them, unless the environment says no."""
    before = {module: shows for module, shows, _ in _known_bars()}
    try:
        yield
    finally:
        constants = sys.modules.get("huggingface_hub.constants")
        by_default = not getattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", None)
        # The switch of transformers is also that of the hub, whose own comes after it.
        for module, shows, switch in _known_bars():
            wanted = before.get(module, by_default)
            if wanted != shows:
                getattr(module, f"{'enable' if wanted else 'disable'}_{switch}")()


def _known_bars() -> Iterator[tuple[types.ModuleType, bool, str]]:
    """The imported modules that switch bars, whether they show them, and the name of their switch."""
    for name, switch in _BARS.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        asks = getattr(module, "is_progress_bar_enabled", None)
        yield module, bool(asks() if asks else not module.are_progress_bars_disabled()), switch


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
