"""Run a program's main so that a user's mistake ends it with one sentence, printed by only one rank."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from training.utils.base.console import ends_with_its_reader, output_may_be_lost, print_to, write_to
from training.utils.base.credentials import RedactedStream, hide, hide_environment
from training.utils.base.errors import ThreestepError, disk_error_in, disk_sentence, first_line, in_words
from training.utils.base.machine import is_out_of_memory, out_of_memory_sentence

MISTAKE_EXIT_CODE = 2
SAFE_PATH_VARIABLE, FOR_THE_LAUNCHER = "PYTHONSAFEPATH", "launcher"  # any text turns it on
CRASH_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: 1 is an answer of some programs
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT  # as a shell has it
# Of huggingface_hub, and whatever else respects https://donottrack.sh: no usage data leaves the machine.
_NO_TELEMETRY = ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")
_FIRST_ERROR = "the first error of the run"
_FIRST_ERROR_SECONDS = 3.0  # how long a rank that lost another one waits for the other's error
_CLAIM_LIFETIME_SECONDS = 60.0
LEAVING_THREAD = "leaving the process group"  # alive where a collective is pending
_EXIT_SECONDS = 10.0  # for what is registered with atexit, in a process that will not end by itself


def run_program(
    main: Callable[[Sequence[str]], object], uses_deepspeed: bool = True, output_is_log: bool = False
) -> None:
    """Call `main` with the command line. A ThreestepError, out of memory and a disk that refuses end it with code 2 and
    one sentence, Ctrl-C with code 130 and one; any other error ends it with code 70 and its traceback, and of several
    ranks only the first prints one.

    output_is_log: output may be lost on a full disk or a closed terminal, and the program continues
    """
    logging.raiseExceptions = False  # a log that cannot be written: logging itself would print a traceback
    threading.excepthook = _thread_failed
    os.umask(os.umask(0o022) | 0o002)  # the user's own, but never world-writable
    if threading.current_thread() is threading.main_thread():  # the launcher blocks it in DeepSpeed's programs
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    no_telemetry(os.environ)
    if os.environ.get(SAFE_PATH_VARIABLE) == FOR_THE_LAUNCHER:  # not for programs that a user's functions start
        del os.environ[SAFE_PATH_VARIABLE]
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or torch would take the GPU that DeepSpeed leaves alone
    if not uses_deepspeed:  # transformers imports it if it is installed, and it then looks for a device
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    hide(sys.argv)
    hide_environment(os.environ)
    try:
        with output_may_be_lost() if output_is_log else ends_with_its_reader():
            _redact_streams()
            _run(main)
    except BrokenPipeError as problem:  # a socket's, or another file's
        _crash(problem)
    finally:
        _redact_streams()  # the interpreter prints a traceback to the streams of before


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage inside, where large packages are imported.

    In a program that had imported none of them before, what is in memory then is never looked through again: neither by
    a later collection nor by the one at the end, which takes 0.7 s. Both together are a third of a small run.
    """
    collects = gc.isenabled()
    is_program = "torch" not in sys.modules or gc.get_freeze_count() > 0  # not a notebook's own objects
    gc.disable()
    try:
        yield
    finally:
        if is_program:
            gc.freeze()
        if collects:
            gc.enable()


def _run(main: Callable[[Sequence[str]], object]) -> None:
    try:
        _check_readable(sys.argv[1:])
        main(sys.argv[1:])
    except ThreestepError as mistake:
        _exit_with(str(mistake), MISTAKE_EXIT_CODE)
    except KeyboardInterrupt as stop:
        _exit_with(str(stop) or "stopped by Ctrl-C", INTERRUPTED_EXIT_CODE)
    except Exception as problem:  # noqa: BLE001 (it is printed, or raised again)
        if is_out_of_memory(problem):
            _exit_with(out_of_memory_sentence(problem), MISTAKE_EXIT_CODE)
        refusal = disk_error_in(problem)
        if refusal is not None:
            _exit_with(disk_sentence(refusal), MISTAKE_EXIT_CODE)
        if isinstance(problem, BrokenPipeError) and _world_size() == 1:
            raise  # standard output's, perhaps: `ends_with_its_reader` knows
        if _world_size() == 1:
            _crash(problem)
        _end_among_ranks(problem)


def _crash(problem: BaseException) -> NoReturn:
    write_to(sys.stderr, "".join(traceback.format_exception(problem)))
    _leave(CRASH_EXIT_CODE)


def _check_readable(words: Sequence[str]) -> None:
    """ThreestepError for a word, such as a file's name, that is not of the locale's encoding: nothing can write it."""
    for word in words:
        if any("\udc80" <= sign <= "\udcff" for sign in word):  # as Python marks such bytes (PEP 383)
            raise ThreestepError(
                f"{ascii(word)} cannot be encoded in this locale ({sys.getfilesystemencoding()}); set "
                "LC_ALL=C.UTF-8 or PYTHONUTF8=1, or rename the file"
            )


def _redact_streams() -> None:
    """Leave credentials out of what libraries print, and of tracebacks. Of standard output the hidden ones alone: it
    may be a model's answer, with addresses that are nobody's."""
    if not isinstance(sys.stdout, RedactedStream):
        sys.stdout = RedactedStream(sys.stdout, whole=False)  # type: ignore[assignment]
    if not isinstance(sys.stderr, RedactedStream):
        sys.stderr = RedactedStream(sys.stderr, whole=True)  # type: ignore[assignment]


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Print one line for a disk that refuses a thread's writes, as TensorBoard's thread reports them too."""
    refusal = None if failure.exc_value is None else disk_error_in(failure.exc_value)
    if refusal is None:
        threading.__excepthook__(failure)
    else:
        print_to(sys.stderr, f"warning: cannot write to disk: {in_words(refusal)}")


def no_telemetry(environment: MutableMapping[str, str]) -> None:
    """Turn off usage reports of libraries before they are imported, unless the user has set them."""
    for name in _NO_TELEMETRY:
        environment.setdefault(name, "1")


def _end_among_ranks(problem: Exception) -> NoReturn:
    """End with code 70, and the traceback of this host's first error; or with 1, and a sentence, where a rank ended
    without one."""
    rank = os.environ.get("RANK", "?")
    if not is_lost_rank(problem):
        if _claim_to_speak(_FIRST_ERROR):
            print(f"error on rank {rank} (the first of the run):", file=sys.stderr)
            traceback.print_exception(problem)
            sys.stderr.flush()
        _leave(CRASH_EXIT_CODE)
    outlast_the_launcher()
    deadline = time.monotonic() + _FIRST_ERROR_SECONDS
    while time.monotonic() < deadline:
        if _claim_of(_FIRST_ERROR).exists():
            _leave(1)  # the other rank has printed why it ended
        time.sleep(0.05)
    line = first_line(problem)
    if "timed out" in line.lower() or "timeout" in line.lower():
        why = "waited for another rank, which hangs or is far slower, until --rank_timeout expired"
    else:
        why = (
            "lost another rank, which ended without an error message; it was killed from outside, or by the system "
            "for lack of memory"
        )
    _exit_with(f"rank {rank} {why} ({line}); with checkpoints, --resume continues from the last one", 1, _FIRST_ERROR)


def outlast_the_launcher() -> None:
    """Ignore SIGTERM, which a launcher sends to the remaining ranks about a second after the first one ended: this one
    has not yet said why it ends."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def is_lost_rank(problem: BaseException) -> bool:
    """True if a collective failed because of another rank: gloo's messages, NCCL's and the store's errors."""
    if any(kind.__name__ == "DistError" for kind in type(problem).__mro__):
        return True
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")
    return isinstance(problem, (RuntimeError, OSError)) and any(word in str(problem) for word in words)


def _exit_with(sentence: str, code: int, claim: str = "") -> NoReturn:
    """Print a sentence, once on this host for a `claim`, and record that the first error was printed."""
    if _claim_to_speak(claim or sentence):
        print_to(sys.stderr, f"error: {sentence}")
    _claim_to_speak(_FIRST_ERROR)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """sys.exit; or where a thread still waits for other ranks, an end that does not wait for it."""
    if not any(thread.name == LEAVING_THREAD for thread in threading.enumerate()):
        sys.exit(code)
    threading.Thread(target=_end_after, args=(_EXIT_SECONDS, code), daemon=True).start()
    atexit._run_exitfuncs()
    _end_after(0.0, code)


def end_without_waiting(sentence: str) -> NoReturn:
    """End the process with code 1, from any thread; print `sentence` unless this host has read of an error."""
    if _claim_to_speak(_FIRST_ERROR):
        print_to(sys.stderr, f"error: {sentence}")
    _end_after(0.0, 1)


def _end_after(seconds: float, code: int) -> NoReturn:
    time.sleep(seconds)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _claim_of(sentence: str) -> Path:
    """The file by which one rank of this host claims `sentence`; ranks of one launch share a parent process."""
    digest = hashlib.sha256(sentence.encode()).hexdigest()[:16]
    key = f"{_claims_of_user()}{os.getppid()}_{os.environ.get('MASTER_PORT', '')}_{digest}"
    return Path(tempfile.gettempdir()) / key


def _claims_of_user() -> str:
    return f"threestep_{os.getuid()}_"


def _drop_old_claims(folder: Path) -> None:
    """Remove what earlier runs left too: nobody else does."""
    oldest = time.time() - _CLAIM_LIFETIME_SECONDS
    for claim in folder.glob(f"{_claims_of_user()}*"):
        with contextlib.suppress(OSError):  # another rank was faster
            if claim.stat().st_mtime < oldest:
                claim.unlink()


def _claim_to_speak(sentence: str) -> bool:
    """True on the first rank of this host to meet `sentence`."""
    if _world_size() == 1:
        return True
    claim = _claim_of(sentence)
    try:
        _drop_old_claims(claim.parent)
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
