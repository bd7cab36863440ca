"""Console output of a run, from rank 0 alone, and the command that the user typed, for messages that tell them to type
it again. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import codecs
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from training.utils.base.credentials import redacted

_ESCAPES = "threestep.escapes"  # the name of this handling of errors, for streams


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Escape as JSON does what an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)), error.end


codecs.register_error(_ESCAPES, _escaped)
WARNINGS: dict[str, None] = {}  # lines of `log`, for the run's page


def log(sentence: str, is_main_rank: bool = True) -> None:
    """Print one line on rank 0, above an open progress bar."""
    if not is_main_rank:
        return
    sentence = redacted(sentence)
    if sentence.startswith("warning: "):
        WARNINGS[sentence.removeprefix("warning: ")] = None
    if sys.stderr.isatty():
        from tqdm import tqdm

        with suppress(OSError):
            tqdm.write(_writable(sys.stdout, sentence), file=sys.stdout)  # clears an open bar and draws it again
            sys.stdout.flush()
    else:
        print_to(sys.stdout, sentence)


def counted(number: float, word: str) -> str:
    """E.g. `1 row` or `1,200 rows`."""
    return f"{number:,.10g} {word}{'' if number == 1 else 's'}"


def log_on_main(sentence: str) -> None:
    """Print one line on the main rank, by the launcher's environment."""
    log(sentence, started_as_main_rank())


def print_to(stream: TextIO, sentence: str) -> None:
    """Print one line; do nothing if it cannot be written."""
    write_to(stream, sentence + "\n")


def write_to(stream: TextIO, text: str) -> None:
    """Write text to a stream; do nothing if it cannot be written."""
    with suppress(OSError):
        stream.write(_writable(stream, text))
        stream.flush()


def _writable(stream: TextIO, text: str) -> str:
    """The text as the stream's encoding has it, whoever made the stream."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text if text.isascii() else text.encode(encoding, _ESCAPES).decode(encoding)


@contextmanager
def output_may_be_lost() -> Iterator[None]:
    """Inside, no print fails, nor do those of libraries and their progress bars: output that a full disk or a closed
    terminal refuses is lost. For programs whose result is not their output."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_unfailing, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Inside, a standard output that nobody reads any more (`| head`) ends the process without a word, with the code
    that a shell has for SIGPIPE. A mistake keeps its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPES)
    try:
        yield
        sys.stdout.flush()
    except SystemExit as end:
        if not _drop_unread_output() or end.code not in (None, 0):
            raise
    except BrokenPipeError:  # or a socket's, or another file's
        if not _drop_unread_output():
            raise
    else:
        return
    sys.exit(128 + signal.SIGPIPE)


def _drop_unread_output() -> bool:
    """True if standard output is a pipe without a reader; the rest of it is dropped, also at the interpreter's end."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # of a test or a notebook
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _unfailing(stream: TextIO) -> TextIO:
    """The same file as a stream that never fails; `stream` itself where it is no plain file, as in a notebook."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    buffer = stream.buffer
    is_unbuffered = isinstance(buffer, io.FileIO)  # python -u
    if not is_unbuffered and not isinstance(getattr(buffer, "raw", None), io.FileIO):
        return stream
    with suppress(OSError):
        stream.flush()
    raw: Any = _TakesEverything(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        stream.encoding,
        _ESCAPES,
        line_buffering=stream.line_buffering,
        write_through=is_unbuffered,
    )


class _TakesEverything(io.FileIO):
    """A file for which everything is written, even what the system refuses."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def started_as_main_rank() -> bool:
    """True on the main rank, by the launcher's environment; for output before the ranks meet."""
    return os.environ.get("RANK", "0") == "0"


def note(sentence: str) -> None:
    """Print one line to standard error, on rank 0: for programs whose standard output is their result."""
    if started_as_main_rank():
        print_to(sys.stderr, redacted(sentence))


@dataclass(frozen=True)
class LogPace:
    """Pace of progress lines in a log that is a file: one once at least `seconds` seconds have passed since the
    last one. The first and the last step always have a line, unless it `waits`: then short work has none."""

    seconds: float = 60.0
    waits: bool = False


# Set by the console command `threestep` and by scripts/*.sh, also for the ranks that they start.
COMMAND_VARIABLE = "THREESTEP_COMMAND"
# How many of a program's first words such a script put there itself.
OWN_WORDS_VARIABLE = "THREESTEP_OWN_WORDS"
RANKS_VARIABLE = "THREESTEP_RANKS"
HOSTFILE_VARIABLE = "THREESTEP_HOSTFILE"
RANK_FLAGS = ("--num_ranks", "--ranks")  # a step knows them too, for what plugins do in place of its run
# In the environment of a step that a program runs together with the others on the same data.
WHOLE_RUN_VARIABLE = "THREESTEP_WHOLE_RUN"


def typed_command() -> str | None:
    """E.g. `threestep sft` or `bash scripts/step1_sft.sh`; None if the program was started by neither."""
    return os.environ.get(COMMAND_VARIABLE) or None


def resuming_command(program: str, ranks: int) -> str:
    """The command that starts `program` again on as many ranks, without its flags: the one that was typed where that
    is known. program: the module, as `python -m` takes it."""
    typed = typed_command()
    if typed is not None:
        return f"{typed} --num_ranks {ranks}"
    if RANKS_VARIABLE not in os.environ and ranks == 1:
        return f"python -m {program}"
    return f"{RANKS_VARIABLE}={ranks} python -m training.utils.run.launch {program}"
