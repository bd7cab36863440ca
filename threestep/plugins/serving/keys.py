"""Keys of services, from a file or from the environment; whatever is printed or written leaves them out."""

from __future__ import annotations

import os
from pathlib import Path

from training.utils.base.credentials import hide_secret
from training.utils.base.errors import ThreestepError

KEY_VARIABLE = "THREESTEP_API_KEY"  # of servers of ours, and of those that ask them


def given_key(file: str | None, variable: str, flag: str) -> str | None:
    """Return the key in `file`, which is the value of `flag`, or else in the environment's `variable`; None without
    either. ThreestepError for a file that cannot be read, and for a key that no header can have."""
    if file is not None:
        where = f"{flag} {file}"
        try:
            key = Path(file).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or "it is not text"
            raise ThreestepError(
                f"{where} must be a file with a key, but it cannot be read: {reason}; use another path"
            ) from problem
    elif variable in os.environ:
        where, key = variable, os.environ[variable].strip()
    else:
        return None
    if not key or not all("!" <= character <= "~" for character in key):
        raise ThreestepError(f"{where}: the key must be printable ASCII characters without spaces; use another one")
    hide_secret(key)
    return key
