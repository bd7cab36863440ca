"""Runs a program's main so that a user's mistake ends it with one sentence, printed once.

Several ranks that meet the same mistake print it once: the first to claim it speaks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from training.utils.run.errors import ThreestepError

MISTAKE_EXIT_CODE = 2
_CLAIM_LIFETIME_SECONDS = 60.0


def run_program(main: Callable[[Sequence[str]], None]) -> None:
    """Call `main` with the command line; end with code 2 and one sentence on a ThreestepError."""
    try:
        main(sys.argv[1:])
    except ThreestepError as mistake:
        if _claim_to_speak(str(mistake)):
            print(f"error: {mistake}", file=sys.stderr, flush=True)
        sys.exit(MISTAKE_EXIT_CODE)


def _claim_to_speak(sentence: str) -> bool:
    """True on the first rank of this host to meet `sentence`; ranks of one launch share a parent process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    key = f"threestep_{os.getuid()}_{os.getppid()}_{os.environ.get('MASTER_PORT', '')}_{hash_of(sentence)}"
    claim = Path(tempfile.gettempdir()) / key
    try:
        if claim.exists() and time.time() - claim.stat().st_mtime > _CLAIM_LIFETIME_SECONDS:
            claim.unlink()
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def hash_of(text: str) -> str:
    """A short, stable name for `text`."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]
