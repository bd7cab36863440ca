"""Log lines: rank 0 speaks, the others are silent; what cannot be printed ends nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from training.utils.base.console import (
    COMMAND_VARIABLE,
    counted,
    log,
    output_may_be_lost,
    print_to,
    resuming_command,
    typed_command,
)

_PRINTS = """
import logging, sys, warnings
from tqdm import tqdm
from training.utils.base.console import log
from training.utils.run.program import run_program
from training.utils.run.progress import ShownFigure, progress_bar, show

def main(argv):
    for number in range(99):
        log("x" * 999)
        print("y" * 999, file=sys.stderr)
        logging.warning("z" * 999)
        warnings.warn(str(number))
    with progress_bar(1, "SFT", True) as bar:
        show(bar, ShownFigure("loss", 1.0))
    for _ in tqdm(range(3)):  # a library's
        pass
    open(argv[0], "w").write("the end")

run_program(main, output_is_log=True)
"""


def test_who_speaks_and_in_which_characters(capsys):
    log("one")
    log("two", is_main_rank=False)
    with output_may_be_lost():
        print("three")
    print("four")
    assert capsys.readouterr().out == "one\nthree\nfour\n"
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    print_to(stream, "\u00e4")
    assert stream.buffer.getvalue() == b"\\u00e4\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("place", ["/dev/full", "a pipe that nobody reads"])
def test_a_run_whose_output_goes_nowhere_ends_well(tmp_path, place, unbuffered):
    if place == "/dev/full" and not os.path.exists(place):
        pytest.skip("a system without /dev/full")
    reader, writer = os.pipe() if place != "/dev/full" else (None, os.open(place, os.O_WRONLY))
    if reader is not None:
        os.close(reader)
    words = [sys.executable, "-c", _PRINTS, str(tmp_path / "end")]
    done = subprocess.run(words, stdout=writer, stderr=writer, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "end").read_text() == "the end"


def test_a_program_whose_result_cannot_be_printed_says_so():
    if not os.path.exists("/dev/full"):
        pytest.skip("a system without /dev/full")
    words = "from training.utils.run.program import run_program; run_program(lambda argv: print('x', flush=True))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "error: cannot write to disk: a write: No space left on device" in done.stderr


_SPEAKS = r"""
import json, sys
from tqdm import tqdm
from training.utils.base.console import log, note
from training.utils.run.program import run_program
from training.utils.run.progress import ShownFigure, progress_bar, show

def main(argv):
    log("log \u00e4\u4f60\U0001f600 \ud800")
    note("note \u00e4")
    print(json.dumps("\u00e4\u4f60\U0001f600", ensure_ascii=False), flush=True)
    with progress_bar(1, "\u4f60", True) as bar:
        show(bar, ShownFigure("\u00e4", 1.0))
    sys.stderr.write("stderr \u00e4\n")

run_program(main, output_is_log=len(sys.argv) > 1)
"""


@pytest.mark.parametrize("words", [[], ["as a log"]])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8", "ascii:surrogateescape"])
def test_characters_that_the_output_lacks_are_escaped(encoding, words):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", _SPEAKS, *words], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    log_line, result = done.stdout.decode(encoding.partition(":")[0]).splitlines()
    assert json.loads(result) == "\u00e4\u4f60\U0001f600"  # the same, however it is written
    assert json.loads(f'"{log_line}"') == "log \u00e4\u4f60\U0001f600 \ud800"


def test_a_name_that_the_locale_cannot_read_is_refused():
    program = "from training.utils.run.program import run_program; run_program(print)"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", program, "zeilen_\u00e4.jsonl".encode()]
    done = subprocess.run(words, capture_output=True, env=environment, check=False, text=True)
    assert (
        done.returncode == 2 and "error: 'zeilen_\\udcc3\\udca4.jsonl' cannot be encoded in this locale" in done.stderr
    )


@pytest.mark.parametrize(
    ("variables", "ranks", "command"),
    [
        ({}, 1, "python -m training.a.main"),
        ({}, 2, "THREESTEP_RANKS=2 python -m training.utils.run.launch training.a.main"),
        ({"THREESTEP_RANKS": "1"}, 1, "THREESTEP_RANKS=1 python -m training.utils.run.launch training.a.main"),
        ({COMMAND_VARIABLE: "threestep sft"}, 2, "threestep sft --num_ranks 2"),
        ({COMMAND_VARIABLE: "bash scripts/a.sh", "THREESTEP_RANKS": "2"}, 2, "bash scripts/a.sh --num_ranks 2"),
    ],
)
def test_the_command_is_the_one_that_was_typed(monkeypatch, variables, ranks, command):
    for name in (COMMAND_VARIABLE, "THREESTEP_RANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert typed_command() == variables.get(COMMAND_VARIABLE)
    assert resuming_command("training.a.main", ranks) == command


@pytest.mark.parametrize(
    ("number", "said"), [(1, "1 row"), (1.0, "1 row"), (0, "0 rows"), (1.5, "1.5 rows"), (12345678, "12,345,678 rows")]
)
def test_one_of_a_thing_is_singular(number, said):
    assert counted(number, "row") == said
