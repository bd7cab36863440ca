"""The helpers that launch ranks and fork programs: reports come home, failures are told, nothing is left behind, and a
program that tests fork is what it would be as a process of its own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
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
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HF_HUB_OFFLINE", "LD_PRELOAD"])
def test_what_libraries_read_as_they_are_imported_is_never_another(name: str) -> None:
    assert may_fork(os.environ)
    assert not may_fork({**os.environ, name: "another"})


def test_a_rank_that_fails_and_time_that_runs_out_end_a_program_of_ranks() -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(100)"
    assert run_python(["-c", code], ranks=2, timeout_seconds=60).returncode == 9
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(60)"], timeout_seconds=0.5)


def test_two_ranks_meet_and_report():
    results = run_ranks(
        """
        import os, sys, torch, torch.distributed as dist
        from tests.distributed.launch import report
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        report({"rank": dist.get_rank(), "sum": total.item(), "args": sys.argv[1:],
                "threads": os.environ["OMP_NUM_THREADS"]})
        dist.destroy_process_group()
        """,
        world_size=2,
        args=["a b", 3],
    )
    assert results == [{"rank": rank, "sum": 3.0, "args": ["a b", "3"], "threads": "1"} for rank in (0, 1)]


def test_a_failing_rank_ends_the_others_and_shows_its_words():
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 ended with code 1") as failure:
        run_ranks(
            """
            import os, time
            if os.environ["RANK"] == "1":
                raise RuntimeError("the words of rank one")
            time.sleep(60)
            """
        )
    assert "the words of rank one" in str(failure.value)
    assert time.monotonic() - started < 30


def test_time_runs_out_and_no_process_is_left(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(AssertionError, match="not done after 2 seconds"):
        run_ranks(script, args=[tmp_path], timeout_seconds=2)
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)
