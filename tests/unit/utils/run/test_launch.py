"""How a step is started: the number of ranks, the command, the environment, signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from training.utils.base.errors import ThreestepError
from training.utils.run import launch

PACKAGE = str(Path(launch.__file__).parents[2])


@pytest.mark.parametrize(
    ("asked", "variable", "gpus", "ranks"),
    [
        (None, None, 0, 1),  # a CPU: one process
        (None, None, 1, 1),
        (None, None, 4, 4),  # one rank a GPU
        (2, None, 0, 2),  # a configuration asks
        (2, "3", 0, 3),  # the variable is stronger
        (2, " ", 0, 2),  # an empty variable says nothing
        (2, "1", 1, 1),
    ],
)
def test_ranks(asked, variable, gpus, ranks):
    environment = {} if variable is None else {"THREESTEP_RANKS": variable}
    assert launch.choose_ranks(asked, environment, gpus) == ranks


@pytest.mark.parametrize(
    ("asked", "variable", "gpus", "message"),
    [
        (None, "two", 0, "THREESTEP_RANKS expects a positive whole number, got 'two'"),
        (None, "0", 0, "THREESTEP_RANKS expects a positive whole number, got 0"),
        (-1, None, 0, "ranks expects a positive whole number, got -1"),
        (2, None, 1, "asks for 2 ranks, and 1 GPU is visible.*THREESTEP_RANKS=1"),
        (None, "9", 8, "THREESTEP_RANKS asks for 9 ranks, and 8 GPUs are visible"),
    ],
)
def test_ranks_that_cannot_be(asked, variable, gpus, message):
    environment = {} if variable is None else {"THREESTEP_RANKS": variable}
    with pytest.raises(ThreestepError, match=message):
        launch.choose_ranks(asked, environment, gpus)


@pytest.mark.parametrize(
    ("installed", "environment", "names"),
    [
        (0, {}, []),
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


def test_one_rank_needs_no_launcher():
    command = launch.launch_command("training.step1_sft.main", 1, ["--config", "a b.yaml"])
    assert command == [sys.executable, PACKAGE, "training.step1_sft.main", "--config", "a b.yaml"]


def test_a_module_of_somebody_else_is_looked_for_where_python_looks():
    assert launch.launch_command("a_step", 1, ["--seed", "3"]) == [sys.executable, "-m", "a_step", "--seed", "3"]
    assert launch.launch_command("trainings", 1) == [sys.executable, "-m", "trainings"]


def test_a_training_py_where_one_works_is_nothing_to_the_package(tmp_path):
    """Nor is a module that the libraries import; what is on PYTHONPATH stays on the path."""
    for name in ("training.py", "argparse.py"):
        (tmp_path / name).write_text("raise SystemExit('the one of the current folder')\n")
    shown = subprocess.run(
        launch.launch_command("training.step1_sft.main", 1, ["--help"]),
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "--output_dir" in shown.stdout, shown.stderr


def test_several_ranks_go_through_deepspeed(monkeypatch):
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    command = launch.launch_command("training.step1_sft.main", 2, ["--seed", "3"], port="29876")
    assert command[:2] == [sys.executable, "deepspeed"]
    assert " ".join(command[2:]) == (
        f"--quiet --num_accelerators 2 --no_local_rank --master_port 29876 {PACKAGE} training.step1_sft.main --seed 3"
    )


def test_chosen_gpus_are_named(monkeypatch):
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    command = launch.launch_command("m", 2, [], ["4", "6", "7"])
    assert command[command.index("--include") + 1] == "localhost:4,6"
    assert "--num_accelerators" not in command


def test_a_hostfile_goes_to_deepspeed_over_ssh(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n")
    environment = {"THREESTEP_HOSTFILE": str(hosts)}
    command = launch.hostfile_command("m", ["--seed", "3"], environment)
    assert command == [
        sys.executable, "deepspeed", "--hostfile", str(hosts), "--no_local_rank", "--module", "m", "--seed", "3"
    ]  # fmt: skip
    command = launch.hostfile_command("m", [], {**environment, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
    assert " ".join(command[4:]) == "--no_local_rank --master_addr 10.0.0.1 --master_port 29501 --module m"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"THREESTEP_HOSTFILE": "/no/hosts"},
            "expects a file of lines `HOST slots=RANKS`, got '/no/hosts', which does not exist",
        ),
        ({"THREESTEP_HOSTFILE": __file__, "THREESTEP_RANKS": "2"}, "are both set.*unset THREESTEP_RANKS"),
    ],
)
def test_hostfiles_that_cannot_be(environment, message):
    with pytest.raises(ThreestepError, match=message):
        launch.hostfile_command("m", [], environment)


@pytest.mark.parametrize(
    ("variables", "started"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "THREESTEP_RANKS": "4"}, "plain"),  # torchrun started it: it is one rank
        ({"RANK": "1", "WORLD_SIZE": "2", "THREESTEP_HOSTFILE": __file__}, "plain"),
        ({"THREESTEP_HOSTFILE": __file__}, "--hostfile"),
        ({"THREESTEP_RANKS": "4"}, "--num_accelerators"),
        ({}, "plain"),
    ],
)
def test_what_a_launch_starts(monkeypatch, capsys, variables, started):
    commands = []
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 0)
    monkeypatch.setattr(launch, "run_and_wait", lambda command, environment=None, **_: commands.append(command) or 0)
    for name in ("RANK", "WORLD_SIZE", "THREESTEP_RANKS", "THREESTEP_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.launch("m", ["--seed", "3"]) == 0
    (command,) = commands
    if started == "plain":
        assert command == [sys.executable, "-m", "m", "--seed", "3"]
    else:
        assert started in command
    assert capsys.readouterr().out.startswith("+ ") == ("RANK" not in variables)  # ranks do not each say it


@pytest.mark.parametrize(("module", "variable"), [("training.step1_sft.main", "launcher"), ("mine.main", None)])
def test_the_launcher_finds_pythons_modules_first_and_somebody_elses_theirs(monkeypatch, module, variable):
    given = []
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 0)
    monkeypatch.setattr(launch, "run_and_wait", lambda command, environment=None, **_: given.append(environment) or 0)
    launch.launch(module, [], 2, {})
    launch.launch(module, [], None, {"THREESTEP_HOSTFILE": __file__})
    assert [environment.get("PYTHONSAFEPATH") for environment in given] == [variable] * 2
    launch.launch(module, [], 2, {"PYTHONSAFEPATH": "1"})
    assert given[2]["PYTHONSAFEPATH"] == "1"  # the user's


@pytest.mark.needs_plugin("names")
def test_flags_of_the_launcher_behind_a_script(monkeypatch, capsys):
    """As DeepSpeed-Chat's lines have them before main.py."""
    started = []
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 8)
    monkeypatch.setattr(launch, "run_and_wait", lambda *started_with, **_: started.append(started_with) or 0)
    names = "RANK WORLD_SIZE THREESTEP_RANKS THREESTEP_HOSTFILE MASTER_PORT CUDA_VISIBLE_DEVICES DS_ACCELERATOR"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    launch.launch("m", "--num_gpus 1 --seed 3 --num_nodes=1".split())
    launch.launch("m", "--num_gpus=2 --master_port 12346 --deepspeed".split())
    launch.launch("m", "--num_gpus -1".split())
    launch.launch("m", "--num_ranks=2 --seed 3".split())
    assert [command[1:] for command, _ in started] == [
        ["-m", "m", "--seed", "3"],
        "deepspeed --quiet --include localhost:0,1 --no_local_rank --master_port 12346 --module m --deepspeed".split(),
        ["deepspeed", "--quiet", "--include", "localhost:0,1,2,3,4,5,6,7", "--no_local_rank", "--master_port",
         started[2][0][7], "--module", "m"],
        ["deepspeed", "--quiet", "--include", "localhost:0,1", "--no_local_rank", "--master_port", started[3][0][7],
         "--module", "m", "--seed", "3"],
    ]  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("+ ")]
    assert lines == [
        "--num_gpus 1 is read as THREESTEP_RANKS=1",
        "--num_gpus 2 is read as THREESTEP_RANKS=2",
        "--master_port 12346 is read as MASTER_PORT=12346",
        "--num_ranks 2 is read as THREESTEP_RANKS=2",
    ]


def test_a_single_rank_runs_where_the_caller_says(monkeypatch):
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 0)
    monkeypatch.setattr(launch, "run_and_wait", lambda command, environment=None, **_: 5)
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    ran = []
    assert launch.launch("m", ["--seed", "3"], environment={}, here=ran.append) == 0
    assert launch.launch("m", [], environment={"RANK": "1", "WORLD_SIZE": "2"}, here=ran.append) == 0
    assert launch.launch("m", ["--num_ranks", "2"], environment={}, here=ran.append) == 5
    assert ran == [["--seed", "3"], []]


def test_the_port_is_free(monkeypatch):
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    monkeypatch.delenv("MASTER_PORT", raising=False)
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


def test_a_missing_launcher_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ThreestepError, match="need the program `deepspeed`, found neither next to"):
        launch.launch_command("m", 2)


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_the_exit_code_comes_back(body, code):
    assert launch.run_and_wait([sys.executable, "-c", f"import os, sys; {body}"]) == code


def test_no_module_is_a_mistake():
    with pytest.raises(ThreestepError, match="expected a module first"):
        launch.main(["--config", "x"])


def test_a_terminated_launch_leaves_nothing_behind(tmp_path):
    """SIGTERM to the launching program ends the grandchild too, as it must end DeepSpeed's ranks."""
    pids = tmp_path / "pids"
    tell = f"pathlib.Path({str(pids)!r}).write_text(str(os.getpid()))"
    grandchild = f"import os, pathlib, time; {tell}; time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    program = (
        "import sys\nfrom training.utils.run.launch import run_and_wait\n"
        f"sys.exit(run_and_wait([sys.executable, '-c', {child!r}]))"
    )
    root = Path(launch.__file__).parents[3]
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    try:
        deadline = time.monotonic() + 30
        while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(pids.read_text())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=30) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        launcher.kill()


def test_ranks_get_the_signal_and_their_launcher_does_not(tmp_path):
    """The launcher would die of SIGUSR1; a process that a rank started is the rank's own affair."""
    helper = "import time; time.sleep(60)"
    rank = (
        "import pathlib, signal, subprocess, sys\n"
        f"helper = subprocess.Popen([sys.executable, '-c', {helper!r}])\n"
        "got = []\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "signal.pause()\n"
        "was_running = helper.poll() is None\n"
        "helper.kill()\n"
        "sys.exit(0 if was_running and got else 9)\n"
    )
    launcher = (
        "import os, subprocess, sys\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, 'RANK': '0'}}).returncode)"
    )
    program = (
        "import sys\nfrom training.utils.run.launch import run_and_wait\n"
        f"sys.exit(run_and_wait([sys.executable, '-c', {launcher!r}]))"
    )
    root = Path(launch.__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    started = subprocess.Popen([sys.executable, "-c", program], cwd=root, env=environment)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        started.send_signal(signal.SIGUSR1)
        assert started.wait(timeout=30) == 0
    finally:
        started.kill()


def test_credentials_stand_in_no_command_line_of_this_machine(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launch, "run_and_wait", lambda *given, **_: started.append(given) or 0)
    monkeypatch.setattr(launch, "visible_gpus", lambda environment: [])
    monkeypatch.setenv("THREESTEP_RANKS", "2")
    monkeypatch.delenv("RANK", raising=False)
    address = "jsonl:https://me:a-password@host/rows.jsonl?sig=0123456789abcdef"
    assert launch.launch("my.module", ["--data_path", address, "--seed", "1"]) == 0
    ((command, environment),) = started
    assert command[-4:] == ["--data_path", "jsonl:https://***@host/rows.jsonl?sig=***", "--seed", "1"]
    assert environment["THREESTEP_ADDRESSES"] == address and "a-password" not in capsys.readouterr().out


def test_an_interrupt_of_every_process_is_for_the_ranks_alone(tmp_path):
    """DeepSpeed's runner and launcher, which block it, stay; a rank unblocks it and ends the run with its own code."""
    rank = (
        "import os, signal, sys, time\nfrom training.utils.run.program import run_program\n"
        f"ready = {str(tmp_path / 'ready')!r}\n"
        "def main(argv):\n    open(ready, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
        "run_program(main)"
    )
    launcher = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {rank!r}]).returncode)"
    program = (
        "import sys\nfrom training.utils.run.launch import run_and_wait\n"
        f"sys.exit(run_and_wait([sys.executable, '-c', {launcher!r}], interruptible=False))"
    )
    root = Path(launch.__file__).parents[3]
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in psutil.Process(started.pid).children(recursive=True):
            process.send_signal(signal.SIGINT)
        _, printed = started.communicate(timeout=30)
        assert started.returncode == 130 and printed == "error: stopped by Ctrl-C\n"
    finally:
        started.kill()
