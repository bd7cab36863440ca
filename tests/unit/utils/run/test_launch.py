"""How a step is started: the number of ranks, the command, the environment, signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from training.utils.base.errors import ThreestepError
from training.utils.run import launch

PACKAGE = str(Path(launch.__file__).parents[2])
ROOT = Path(launch.__file__).parents[3]


@pytest.mark.parametrize(
    ("asked", "variable", "gpus", "ranks"),
    [
        (None, None, 0, 1),  # a CPU: one process
        (None, None, 4, 4),  # one rank a GPU
        (2, None, 0, 2),  # a configuration asks
        (2, "3", 0, 3),  # the variable is stronger
        (2, " ", 0, 2),  # an empty variable says nothing
        (2, "1", 1, 1),
        (None, "two", 0, "THREESTEP_RANKS expects a positive whole number, got 'two'"),
        (None, "0", 0, "THREESTEP_RANKS expects a positive whole number, got 0"),
        (-1, None, 0, "ranks expects a positive whole number, got -1"),
        (2, None, 1, "asks for 2 ranks, but 1 GPU is visible.*THREESTEP_RANKS=1"),
        (None, "9", 8, "THREESTEP_RANKS asks for 9 ranks, but 8 GPUs are visible"),
    ],
)
def test_ranks(asked, variable, gpus, ranks):
    environment = {} if variable is None else {"THREESTEP_RANKS": variable}
    if isinstance(ranks, int):
        assert launch.choose_ranks(asked, environment, gpus) == ranks
    else:
        with pytest.raises(ThreestepError, match=ranks):
            launch.choose_ranks(asked, environment, gpus)


@pytest.mark.parametrize(
    ("installed", "environment", "names"),
    [
        (2, {}, ["0", "1"]),
        (4, {"CUDA_VISIBLE_DEVICES": "2, 3"}, ["2", "3"]),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (4, {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        (0, {"CUDA_VISIBLE_DEVICES": "0,1"}, []),  # the variable alone makes no GPU
        (4, {"DS_ACCELERATOR": "cpu"}, []),
    ],
)
def test_visible_gpus(monkeypatch, installed, environment, names):
    monkeypatch.setattr(launch, "_installed_gpus", lambda: installed)
    assert launch.visible_gpus(environment) == names


@pytest.fixture
def started(monkeypatch) -> list[tuple[list[str], Any]]:
    """What is launched on a machine without GPUs and variables: the commands and their environments."""
    launched: list[tuple[list[str], Any]] = []
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 0)

    def run(command, environment=None, **_):
        launched.append((command, environment))
        return 0

    monkeypatch.setattr(launch, "run_and_wait", run)
    names = "RANK WORLD_SIZE THREESTEP_RANKS THREESTEP_HOSTFILE MASTER_PORT CUDA_VISIBLE_DEVICES DS_ACCELERATOR"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    return launched


OURS = "training.step1_sft.main"


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ((OURS, 1, ["--config", "a b.yaml"]), [PACKAGE, OURS, "--config", "a b.yaml"]),
        (("a_step", 1, ["--seed", "3"]), ["-m", "a_step", "--seed", "3"]),  # somebody else's, where Python looks
        (("trainings", 1), ["-m", "trainings"]),
        (
            (OURS, 2, ["--seed", "3"]),
            "deepspeed --quiet --num_accelerators 2 --no_local_rank --master_port 29876".split()
            + [PACKAGE, OURS, "--seed", "3"],
        ),
        (
            ("m", 2, [], ["4", "6", "7"]),  # chosen GPUs are named
            "deepspeed --quiet --include localhost:4,6 --no_local_rank --master_port 29876 --module m".split(),
        ),
    ],
)
def test_the_command(started, given, command):
    assert launch.launch_command(*given, port="29876") == [sys.executable, *command]


def test_a_training_py_where_one_works_is_nothing_to_the_package(tmp_path):
    """Nor is a module that the libraries import; what is on PYTHONPATH stays on the path."""
    for name in ("training.py", "argparse.py"):
        (tmp_path / name).write_text("raise SystemExit('the one of the current folder')\n")
    shown = subprocess.run(
        launch.launch_command("training.step1_sft.main", 1, ["--help"]),
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "--output_dir" in shown.stdout, shown.stderr


def test_a_hostfile_goes_to_deepspeed_over_ssh(started, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n")
    environment = {"THREESTEP_HOSTFILE": str(hosts)}
    command = launch.hostfile_command("m", ["--seed", "3"], environment)
    assert command == [
        sys.executable, "deepspeed", "--hostfile", str(hosts), "--no_local_rank", "--module", "m", "--seed", "3"
    ]  # fmt: skip
    command = launch.hostfile_command("m", [], {**environment, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
    assert " ".join(command[4:]) == "--no_local_rank --master_addr 10.0.0.1 --master_port 29501 --module m"
    missing = "expects a file with lines `HOST slots=RANKS`, got '/no/hosts', which does not exist"
    for wrong, message in (
        ({"THREESTEP_HOSTFILE": "/no/hosts"}, missing),
        ({**environment, "THREESTEP_RANKS": "2"}, "are both set.*unset THREESTEP_RANKS"),
    ):
        with pytest.raises(ThreestepError, match=message):
            launch.hostfile_command("m", [], wrong)


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "THREESTEP_RANKS": "4"}, None),  # torchrun started it: it is one rank
        ({"RANK": "1", "WORLD_SIZE": "2", "THREESTEP_HOSTFILE": __file__}, None),
        ({"THREESTEP_HOSTFILE": __file__}, "--hostfile"),
        ({"THREESTEP_RANKS": "4"}, "--num_accelerators"),
        ({}, None),
    ],
)
def test_what_a_launch_starts(monkeypatch, started, capsys, variables, word):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.launch("m", ["--seed", "3"]) == 0
    ((command, _),) = started
    assert word in command if word else command == [sys.executable, "-m", "m", "--seed", "3"]
    assert capsys.readouterr().out.startswith("+ ") == ("RANK" not in variables)  # ranks do not each say it


@pytest.mark.parametrize(("module", "variable"), [(OURS, "launcher"), ("mine.main", None)])
def test_the_launcher_finds_pythons_modules_first_and_somebody_elses_theirs(started, module, variable):
    launch.launch(module, [], 2, {})
    launch.launch(module, [], None, {"THREESTEP_HOSTFILE": __file__})
    launch.launch(module, [], 2, {"PYTHONSAFEPATH": "1"})  # the user's
    assert [environment.get("PYTHONSAFEPATH") for _, environment in started] == [variable, variable, "1"]


@pytest.mark.needs_plugin("names")
def test_flags_of_the_launcher_behind_a_script(monkeypatch, started, capsys):
    """As DeepSpeed-Chat's lines have them before main.py."""
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 8)
    for words in (
        "--num_gpus 1 --seed 3 --num_nodes=1",
        "--num_gpus=2 --master_port 12346 --deepspeed",
        "--num_gpus -1 --master_port 7",
        "--num_ranks=2 --seed 3 --master_port 7",
    ):
        launch.launch("m", words.split())
    several = "deepspeed --quiet --include localhost:{} --no_local_rank --master_port {} --module m"
    assert [" ".join(command[1:]) for command, _ in started] == [
        "-m m --seed 3",
        several.format("0,1", 12346) + " --deepspeed",
        several.format("0,1,2,3,4,5,6,7", 7),
        several.format("0,1", 7) + " --seed 3",
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("+ ")]
    assert [line for line in lines if "=7" not in line] == [
        "--num_gpus 1 is read as THREESTEP_RANKS=1",
        "--num_gpus 2 is read as THREESTEP_RANKS=2",
        "--master_port 12346 is read as MASTER_PORT=12346",
    ]


def test_a_single_rank_runs_where_the_caller_says(monkeypatch, started):
    ran: list[list[str]] = []
    assert launch.launch("m", ["--seed", "3"], environment={}, here=ran.append) == 0
    assert launch.launch("m", [], environment={"RANK": "1", "WORLD_SIZE": "2"}, here=ran.append) == 0
    monkeypatch.setattr(launch, "run_and_wait", lambda command, environment=None, **_: 5)
    assert launch.launch("m", ["--num_ranks", "2"], environment={}, here=ran.append) == 5
    assert ran == [["--seed", "3"], []]


def test_the_port_is_free(started):
    ports = set()
    for _ in range(3):
        command = launch.launch_command("m", 2)
        ports.add(int(command[command.index("--master_port") + 1]))
    assert len(ports) > 1  # the system's choice each time, not a number of ours
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports.pop()))


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 8)
    assert launch.launch_environment(2, {"A": "b"}) == {"A": "b", "OMP_NUM_THREADS": "4"}
    assert launch.launch_environment(16, {})["OMP_NUM_THREADS"] == "1"
    assert launch.launch_environment(2, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in launch.launch_environment(1, {})


def test_what_cannot_be_started_is_told(monkeypatch, tmp_path):
    with pytest.raises(ThreestepError, match="no module given; pass one first"):
        launch.main(["--config", "x"])
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ThreestepError, match="need the program `deepspeed`, which is neither next to"):
        launch.launch_command("m", 2)


def test_credentials_stand_in_no_command_line_of_this_machine(monkeypatch, started, capsys):
    monkeypatch.setenv("THREESTEP_RANKS", "2")
    address = "jsonl:https://me:a-password@host/rows.jsonl?sig=0123456789abcdef"
    assert launch.launch("my.module", ["--data_path", address, "--seed", "1"]) == 0
    ((command, environment),) = started
    assert command[-4:] == ["--data_path", "jsonl:https://***@host/rows.jsonl?sig=***", "--seed", "1"]
    assert environment["THREESTEP_ADDRESSES"] == address and "a-password" not in capsys.readouterr().out


# --- signals


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_the_exit_code_comes_back(body, code):
    assert launch.run_and_wait([sys.executable, "-c", f"import os, sys; {body}"]) == code


def signalled(tmp_path: Path, rank: str, send: Any, number: str = "RANK", **options: Any) -> tuple[int, str, int]:
    """Run `run_and_wait` of a launcher, which starts `rank` (it writes its pid to `ready`); send a signal then.

    number: the variable by which a rank is known. Returns the exit code, what stderr has, and the rank's pid."""
    ready = tmp_path / "ready"
    rank = rank.replace("READY", repr(str(ready)))
    launcher = (
        "import os, subprocess, sys\n"
        f"ran = subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, {number!r}: '0'}})\n"
        "sys.exit(ran.returncode)"
    )
    program = (
        "import sys\nfrom training.utils.run.launch import run_and_wait\n"
        f"sys.exit(run_and_wait([sys.executable, '-c', {launcher!r}], **{options!r}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not (ready.exists() and ready.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        send(started.pid)
        printed = started.communicate(timeout=30)[1]
        return started.returncode, printed, int(ready.read_text())
    finally:
        started.kill()


WAITS = "import os, time\nopen(READY, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"


def test_a_terminated_launch_leaves_nothing_behind(tmp_path):
    """SIGTERM to the launching program ends the grandchild too, as it must end DeepSpeed's ranks."""
    code, _, pid = signalled(tmp_path, WAITS, lambda pid: os.kill(pid, signal.SIGTERM), "NO_RANK")
    assert code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_get_the_signal_and_their_launcher_does_not(tmp_path):
    """The launcher would die of SIGUSR1; a process that a rank started is the rank's own affair."""
    rank = (
        "import os, signal, subprocess, sys\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "got = []\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))\n"
        "open(READY, 'w').write(str(os.getpid()))\n"
        "signal.pause()\n"
        "was_running = helper.poll() is None\n"
        "helper.kill()\n"
        "sys.exit(0 if was_running and got else 9)\n"
    )
    assert signalled(tmp_path, rank, lambda pid: os.kill(pid, signal.SIGUSR1))[0] == 0


def test_an_interrupt_of_every_process_is_for_the_ranks_alone(tmp_path):
    """DeepSpeed's runner and launcher, which block it, stay; a rank unblocks it and ends the run with its own code."""
    rank = (
        "import os, time\nfrom training.utils.run.program import run_program\n"
        "def main(argv):\n    open(READY, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
        "run_program(main)"
    )

    def interrupt(pid: int) -> None:
        for process in psutil.Process(pid).children(recursive=True):
            process.send_signal(signal.SIGINT)

    code, printed, _ = signalled(tmp_path, rank, interrupt, interruptible=False)
    assert code == 130 and printed == "error: stopped by Ctrl-C\n"
