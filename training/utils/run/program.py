"""Runs a program's main so that a user's mistake ends it with one sentence, printed once.

Several ranks that meet the same mistake print it once: the first to claim it speaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from training.utils.run.errors import ThreestepError
from training.utils.run.memory import is_out_of_memory, out_of_memory_sentence

MISTAKE_EXIT_CODE = 2
# Of huggingface_hub, of vLLM, and of whatever else heeds https://donottrack.sh: no counts of use leave the machine.
_SAYS_NOTHING_TO_SERVICES = ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
_FIRST_ERROR = "the first error of the run"
_FIRST_ERROR_SECONDS = 3.0  # how long a rank that lost another one waits for its words
_CLAIM_LIFETIME_SECONDS = 60.0


def run_program(main: Callable[[Sequence[str]], None]) -> None:
    """Call `main` with the command line; end with code 2 and one sentence on a ThreestepError, and where memory runs
    out. Any other error keeps its traceback, of which several ranks print the first alone."""
    os.umask(os.umask(0o022) | 0o002)  # the user's own, but nothing that anybody may write to
    for name in _SAYS_NOTHING_TO_SERVICES:
        os.environ.setdefault(name, "1")
    try:
        main(sys.argv[1:])
    except ThreestepError as mistake:
        _say_and_exit(str(mistake), MISTAKE_EXIT_CODE)
    except Exception as problem:
        if is_out_of_memory(problem):
            _say_and_exit(out_of_memory_sentence(problem), MISTAKE_EXIT_CODE)
        if _world_size() == 1:
            raise
        _end_among_ranks(problem)


def _end_among_ranks(problem: Exception) -> NoReturn:
    """End with code 1, and the traceback of the first error of this host's ranks, or a sentence where a rank ended
    without any."""
    rank = os.environ.get("RANK", "?")
    if not is_lost_rank(problem):
        if _claim_to_speak(_FIRST_ERROR):
            print(f"error on rank {rank}, the first of the run:", file=sys.stderr)
            traceback.print_exception(problem)
            sys.stderr.flush()
        sys.exit(1)
    # A launcher tells those that are left to end, about a second after the first one did.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + _FIRST_ERROR_SECONDS
    while time.monotonic() < deadline:
        if _claim_of(_FIRST_ERROR).exists():
            sys.exit(1)  # the other rank has said why it ended
        time.sleep(0.05)
    said = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    if "timed out" in said.lower() or "timeout" in said.lower():
        why = "waited in vain for another rank, which hangs or is far slower, until --rank_timeout was over"
    else:
        why = "lost another rank, which ended without a word: killed from outside, or by the system for its memory"
    if _claim_to_speak(_FIRST_ERROR):
        sentence = f"rank {rank} {why} ({said}); with checkpoints, --resume goes on from the last one"
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(1)


def is_lost_rank(problem: BaseException) -> bool:
    """Whether a collective failed for what became of another rank: gloo's words, NCCL's and the store's errors."""
    if any(kind.__name__ == "DistError" for kind in type(problem).__mro__):
        return True
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")
    return isinstance(problem, (RuntimeError, OSError)) and any(word in str(problem) for word in words)


def _say_and_exit(sentence: str, code: int) -> NoReturn:
    """Print a sentence, once on this host, and note that the first error has been said."""
    if _claim_to_speak(sentence):
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    _claim_to_speak(_FIRST_ERROR)
    sys.exit(code)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _claim_of(sentence: str) -> Path:
    """The file by which one rank of this host says `sentence`; ranks of one launch share a parent process."""
    key = f"threestep_{os.getuid()}_{os.getppid()}_{os.environ.get('MASTER_PORT', '')}_{hash_of(sentence)}"
    return Path(tempfile.gettempdir()) / key


def _claim_to_speak(sentence: str) -> bool:
    """True on the first rank of this host to meet `sentence`."""
    if _world_size() == 1:
        return True
    claim = _claim_of(sentence)
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
