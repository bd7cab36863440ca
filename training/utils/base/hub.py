"""The hub within reach or not, in seconds; its client and `datasets` try for minutes. Knows nothing of its content."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

from training.utils.base.errors import ThreestepError, first_line

_SECONDS = 6.0
_DEFAULT = "https://huggingface.co"


def is_offline() -> bool:
    """True if the user set HF_HUB_OFFLINE, with which the hub is never asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_hub(what: str, kind: str, name: str) -> None:
    """ThreestepError, which begins with `what`, unless the hub answers, or its cache here has that repository.

    kind: models or datasets
    """
    if is_offline() or _is_cached(kind, name):
        return
    problem = _problem_reaching(f"{os.environ.get('HF_ENDPOINT') or _DEFAULT}/api/{kind}/{name}")
    if problem is not None:
        raise ThreestepError(
            f"{what} is not here, and the hub could not be reached ({problem}); check the network and the proxy "
            "(HTTPS_PROXY, HF_ENDPOINT), or give a local path"
        )


def _is_cached(kind: str, name: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = f"{kind}--{name.replace('/', '--')}"
    return Path(HF_HUB_CACHE, folder).is_dir()


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
