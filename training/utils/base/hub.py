"""The hub within reach or not, in seconds; its client and `datasets` try for minutes. Knows nothing of its content."""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line

_SECONDS = 6.0
_DEFAULT = "https://huggingface.co"
_OFFLINE = "HF_HUB_OFFLINE"
_CLIENT = "huggingface_hub"


def is_offline() -> bool:
    """True if the user set HF_HUB_OFFLINE, so that the hub is never contacted."""
    return os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def check_hub(what: str, kind: str, name: str) -> None:
    """ThreestepError, which begins with `what`, if the hub does not answer and its cache here lacks that repository.

    If the cache has it, this process stays offline from here on, with a line of the log: the client would wait for
    minutes, file by file, before it took the copy. kind: models or datasets
    """
    if is_offline():
        return
    is_cached = _is_cached(kind, name)
    if is_cached and _CLIENT in sys.modules:  # which has read that variable
        return
    problem = _problem_reaching(f"{os.environ.get('HF_ENDPOINT') or _DEFAULT}/api/{kind}/{name}")
    if problem is None:
        return
    if not is_cached:
        raise ThreestepError(
            f"{what} is not on this machine, and the hub could not be reached ({problem}); check the network and the "
            "proxy (HTTPS_PROXY, HF_ENDPOINT), or pass a local path"
        )
    os.environ[_OFFLINE] = "1"
    log_on_main(f"{what}: the hub could not be reached ({problem}); using the cached copy, as with {_OFFLINE}=1")


def _is_cached(kind: str, name: str) -> bool:
    """True if the client's cache has the repository; its settings are read here, as the client reads more once."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(cache)).expanduser().joinpath(f"{kind}--{name.replace('/', '--')}").is_dir()


def _problem_reaching(address: str) -> str | None:
    """Why nothing at the address answers within `_SECONDS`; None if something does, be it with an error."""
    problems: list[str] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")  # noqa: S310 (the hub's, or the user's own)
            urllib.request.urlopen(request, timeout=2 * _SECONDS).close()  # noqa: S310
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError) as problem:
            # certificates are the client's affair, which has others than Python's
            if "CERTIFICATE" not in str(problem):
                problems.append(first_line(problem).removeprefix("<urlopen error ").removesuffix(">"))

    thread = threading.Thread(target=ask, daemon=True)  # the system may look for a host's address without end
    thread.start()
    thread.join(_SECONDS)
    return f"no answer within {_SECONDS:g} seconds" if thread.is_alive() else next(iter(problems), None)
