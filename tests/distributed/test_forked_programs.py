"""A program that tests fork is what it would be as a process of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.forked_programs import FORKS_VARIABLE, may_fork, run_python

SEEN = """
import atexit, json, os, signal, sys
atexit.register(lambda: print("at exit"))
seen = {"name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "argv": sys.argv, "cwd": os.getcwd()}
seen["environment"] = {name: os.environ.get(name) for name in ("PLANTED", "HOME", "RANK", "OMP_NUM_THREADS")}
seen["leads_its_session"] = os.getsid(0) == os.getpid()
seen["signals"] = [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)]
seen["first_path"] = sys.path[0]
print(json.dumps(seen))
print("of stderr", file=sys.stderr)
"""
ENDS = {"sys.exit(3)": 3, "sys.exit('in words')": 1, "raise ValueError('planted')": 1, "os._exit(7)": 7, "pass": 0}


def both(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.CompletedProcess[str]]:
    """Forked, and as a process of its own."""
    environment = {**os.environ, "PLANTED": "1", "OMP_NUM_THREADS": "1"}
    assert may_fork(environment)
    forked = run_python(words, environment, folder=folder)
    monkeypatch.setenv(FORKS_VARIABLE, "0")
    assert not may_fork(environment)
    return [forked, run_python(words, environment, folder=folder)]


@pytest.fixture(autouse=True)
def forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the long form, which has none elsewhere."""
    monkeypatch.delenv(FORKS_VARIABLE, raising=False)


@pytest.mark.parametrize("how", ["module", "code", "file"])
def test_it_sees_what_a_process_of_its_own_sees(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_program.py").write_text(SEEN)
    first = {"module": ["-m", "planted_program"], "code": ["-c", SEEN], "file": [str(tmp_path / "planted_program.py")]}
    forked, own = both([*first[how], "--flag", "two words"], tmp_path, monkeypatch)
    assert own.returncode == 0 and own.stdout.endswith("at exit\n") and own.stderr == "of stderr\n"
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_process_of_its_own_ends(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, own = both(["-c", f"import os, sys\n{end}"], tmp_path, monkeypatch)
    assert forked.returncode == own.returncode == ENDS[end]
    assert forked.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]


def test_two_draw_other_numbers() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    one, two = (run_python(["-c", code]).stdout.split() for _ in range(2))
    assert len(one) == 2 and not set(one) & set(two)


def test_a_rank_that_fails_ends_the_others_and_gives_the_code() -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(100)"
    assert run_python(["-c", code], ranks=2, timeout_seconds=60).returncode == 9


def test_time_runs_out() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(60)"], timeout_seconds=0.5)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HF_HUB_OFFLINE", "LD_PRELOAD"])
def test_what_libraries_read_as_they_are_imported_is_never_another(name: str) -> None:
    assert may_fork(os.environ)
    assert not may_fork({**os.environ, name: "another"})
