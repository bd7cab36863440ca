"""Start a step as a plain process, or with DeepSpeed's launcher for several ranks.

    python -m training.utils.run.launch training.step1_sft.main --config run.yaml

is what scripts/step1_sft.sh runs. With a hostfile in THREESTEP_HOSTFILE, DeepSpeed's launcher starts the ranks listed
there over ssh. Otherwise the number of ranks is THREESTEP_RANKS, else the caller's number, else one per visible GPU,
or one without GPUs. Neither a single rank nor a process that is already a rank needs the launcher.

This module does not depend on the steps and imports neither torch nor deepspeed: it runs the launcher as a program.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from training.utils.base.console import HOSTFILE_VARIABLE, RANK_FLAGS, RANKS_VARIABLE
from training.utils.base.credentials import lend, redacted
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import cores, free_port
from training.utils.plugins.registry import GROUP, added, launcher_readers
from training.utils.run.program import FOR_THE_LAUNCHER, SAFE_PATH_VARIABLE, run_program

_TERMINATION_SECONDS = 60.0
_PACKAGE = Path(__file__).resolve().parents[2]
# Loaded as a part of `threestep`, beside a `training` of the user's (threestep/own_package.py): so are the ranks'
# modules.
_IS_APART = not __name__.startswith(f"{_PACKAGE.name}.") and __name__ != "__main__"


def choose_ranks(wanted: int | None, environment: Mapping[str, str], gpus: int) -> int:
    """Return the number of ranks: THREESTEP_RANKS, else `wanted`, else one for each of `gpus`, else 1.

    Raises ThreestepError for a count that is not a positive whole number, and for more ranks than GPUs.
    """
    value = environment.get(RANKS_VARIABLE, "").strip()
    origin = RANKS_VARIABLE if value else "ranks"
    if value:
        try:
            ranks = int(value)
        except ValueError:
            raise ThreestepError(f"{RANKS_VARIABLE} expects a positive whole number, got '{value}'") from None
    else:
        ranks = wanted if wanted is not None else max(1, gpus)
    if ranks < 1:
        raise ThreestepError(f"{origin} expects a positive whole number, got {ranks}")
    if 0 < gpus < ranks:
        raise ThreestepError(
            f"{origin} asks for {ranks} ranks, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible: each"
            f" rank needs its own, so set {RANKS_VARIABLE}={gpus}, or CUDA_VISIBLE_DEVICES= (empty) for the CPU"
        )
    return ranks


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the names (indices, or whatever CUDA_VISIBLE_DEVICES holds) of the visible NVIDIA GPUs."""
    if environment.get("DS_ACCELERATOR", "cuda") != "cuda":
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name and name != "-1"] if _installed_gpus() else []
    return [str(index) for index in range(_installed_gpus())]


def launch_command(
    module: str, ranks: int, arguments: Sequence[str] = (), gpu_names: Sequence[str] = (), *, port: str | None = None
) -> list[str]:
    """Return the command that runs `module` with `arguments` on `ranks` ranks of this machine.

    With several ranks it goes through the `deepspeed` launcher, on `port`, or a TCP port free by now.
    """
    if ranks == 1:
        return [sys.executable, *_python_words(module, "-m"), *arguments]
    # The launcher ignores CUDA_VISIBLE_DEVICES when it is given a count (deepspeed 0.19.8,
    # launcher/runner.py: main), so the devices themselves are named where the variable chose some.
    if gpu_names and all(name.isdecimal() for name in gpu_names):
        where = ["--include", f"localhost:{','.join(gpu_names[:ranks])}"]
    else:
        where = ["--num_accelerators", str(ranks)]
    # Without --no_local_rank the launcher adds a --local_rank flag to the step's flags.
    flags = ["--quiet", *where, "--no_local_rank", "--master_port", port or str(free_port())]
    return [sys.executable, _deepspeed_program(), *flags, *_python_words(module, "--module"), *arguments]


def hostfile_command(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command that runs `module` on the hosts of THREESTEP_HOSTFILE (lines `HOST slots=RANKS`), over ssh.

    The ranks meet at MASTER_ADDR (default: the first host's first address) and MASTER_PORT (default: the launcher's,
    for a port that is free here may not be free there). Raises ThreestepError if the file does not exist or
    THREESTEP_RANKS is set as well.
    """
    path = Path(environment[HOSTFILE_VARIABLE]).expanduser()
    if not path.is_file():
        raise ThreestepError(
            f"{HOSTFILE_VARIABLE} expects a file with lines `HOST slots=RANKS`, got '{path}', which does not exist"
        )
    if environment.get(RANKS_VARIABLE, "").strip():
        raise ThreestepError(
            f"{HOSTFILE_VARIABLE} and {RANKS_VARIABLE} are both set, but the hostfile's slots set the number of ranks"
            f" per host: unset {RANKS_VARIABLE}"
        )
    flags = ["--hostfile", str(path.resolve()), "--no_local_rank"]
    for flag, variable in (("--master_addr", "MASTER_ADDR"), ("--master_port", "MASTER_PORT")):
        if environment.get(variable):
            flags += [flag, environment[variable]]
    return [sys.executable, _deepspeed_program(), *flags, *_python_words(module, "--module"), *arguments]


def _python_words(module: str, flag: str) -> list[str]:
    """Arguments of Python or the launcher that run a module. `-m` and `--module`, the flag, put the current folder
    first on the path, where a user's training.py would shadow this package: so its modules go by its folder."""
    if _IS_APART:
        return [str(_PACKAGE.with_name("threestep")), "--run", module]
    return [str(_PACKAGE), module] if _is_ours(module) else [flag, module]


def launch_environment(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with the cores shared out among the ranks, unless OMP_NUM_THREADS is already set.

    Every rank would otherwise start a thread on each core, and two ranks on two cores would only wait for
    each other.
    """
    shared = dict(environment)
    if ranks > 1:
        shared.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    return shared


def launcher_environment(module: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` in which a queue.py of the current folder does not stand for Python's: DeepSpeed's runner
    starts its launcher by `python -m`, which puts that folder first. Python 3.10 does not know the variable, and a
    module of somebody else's may be in that folder."""
    return {**({SAFE_PATH_VARIABLE: FOR_THE_LAUNCHER} if _is_ours(module) else {}), **environment}


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE.name or module.startswith(f"{GROUP}.")


def as_variables(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the other arguments, `environment` with what --num_ranks and flags of launchers say, and a line for each
    of a launcher's, which plugins read. --num_ranks stays an argument of what a plugin does in place of a run.

    Raises ThreestepError for flags without a value, and for those that contradict the environment.
    """
    words, variables, lines = [*arguments], dict(environment), []
    for read in launcher_readers():
        words, variables, more = read(words, variables)
        lines += more
    rest: list[str] = []
    starts_ranks = not _is_in_place_of_run(words)
    while words:
        word = words.pop(0)
        flag, has_equals, value = word.partition("=")
        if flag not in RANK_FLAGS or not starts_ranks:
            rest.append(word)
            continue
        if not has_equals:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
        known = variables.get(RANKS_VARIABLE, "").strip()
        if not value:
            raise ThreestepError(f"{flag} needs a value")
        if known not in ("", value):
            raise ThreestepError(f"{flag} {value} and {RANKS_VARIABLE}={known} contradict each other; remove one")
        variables[RANKS_VARIABLE] = value
    return rest, variables, lines


def _is_in_place_of_run(arguments: Sequence[str]) -> bool:
    """True if the words ask for what a plugin does in place of a run: no ranks are started, and --num_ranks is its."""
    switches = {f"--{name}" for name in added("in_place_of_run", ())}
    for word, value in itertools.pairwise([*arguments, ""]):
        flag, has_equals, own = word.partition("=")
        if flag in switches:
            return (own if has_equals else value).lower() not in ("false", "no", "f", "n", "0")
    return False


def launch(
    module: str,
    arguments: Sequence[str],
    num_ranks: int | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    here: Callable[[Sequence[str]], None] | None = None,
) -> int:
    """Run `module` on that many ranks and print the command. Returns the exit code of the run.

    arguments: the module's, and flags of launchers (`as_variables`)
    environment: the run's; by default this process's
    here: runs the module with its arguments in this process, which is done for a single rank; default: in a new one
    """
    given = os.environ if environment is None else environment
    if "RANK" in given and "WORLD_SIZE" in given:  # torchrun, accelerate launch, ...: this is one rank
        if here is not None:
            here(arguments)
            return 0
        return run_and_wait(launch_command(module, 1, arguments), given)
    arguments, environment, lines = as_variables(arguments, given)
    for line in lines:
        print(line, flush=True)
    if environment.get(HOSTFILE_VARIABLE):
        command = hostfile_command(module, arguments, environment)
        print(f"+ {redacted(shlex.join(command))}", flush=True)
        return run_and_wait(command, launcher_environment(module, environment))
    gpu_names = visible_gpus(environment)
    ranks = choose_ranks(num_ranks, environment, len(gpu_names))
    if ranks == 1 and here is not None:
        os.environ.update(environment)
        here(arguments)
        return 0
    environment = dict(environment)
    lend(list(arguments), environment)
    arguments = [redacted(word) for word in arguments]  # launchers print them, and every user of the machine sees them
    command = launch_command(module, ranks, arguments, gpu_names, port=environment.get("MASTER_PORT"))
    print(f"+ {shlex.join(command)}", flush=True)
    environment = launcher_environment(module, launch_environment(ranks, environment))
    return run_and_wait(command, environment, interruptible=not (ranks > 1 and _is_ours(module)))


def run_and_wait(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, interruptible: bool = True
) -> int:
    """Run `command` and return its exit code (128 + the signal's number where a signal ended it).

    interruptible: False blocks SIGINT in the command and below it; the ranks unblock it (`run_program`). DeepSpeed's
        runner would end with a traceback, and its launcher would kill the ranks, where a Ctrl-C reaches every process

    SIGTERM, SIGINT and SIGUSR1 sent to this process reach the ranks below the command, or where it has none every
    process below it, and a command that fails after one leaves none behind. DeepSpeed's launcher itself must not get
    them: it would kill the ranks, which have a checkpoint to write. So it runs in a new session, which a terminal's
    Ctrl-C does not reach.
    """
    with contextlib.nullcontext() if interruptible else _interrupts_blocked():
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    signalled: list[psutil.Process] = []

    def pass_on(number: int, _frame: object) -> None:
        for member in _receivers(process.pid):
            signalled.append(member)
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)

    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _, lingering = psutil.wait_procs(signalled, timeout=_TERMINATION_SECONDS) if code != 0 else ([], [])
    for member in lingering:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in the processes that it starts inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(argv: Sequence[str]) -> None:
    """Launch the module named first with the flags after it."""
    if not argv or argv[0].startswith("-"):
        raise ThreestepError("no module given; pass one first, such as training.step1_sft.main")
    sys.exit(launch(argv[0], argv[1:]))


def _receivers(pid: int) -> list[psutil.Process]:
    """The ranks below a process, which a launcher gave RANK and which no rank started; if there are none, all."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    in_ranks = {member.pid for member in members if _has_rank(member)}
    tops = [member for member in members if member.pid in in_ranks and member.ppid() not in in_ranks]
    return tops or members


def _has_rank(member: psutil.Process) -> bool:
    try:
        return "RANK" in member.environ()
    except psutil.Error:
        return False


def _deepspeed_program() -> str:
    beside_python = Path(sys.executable).parent / "deepspeed"
    program = str(beside_python) if beside_python.exists() else shutil.which("deepspeed")
    if program is None:
        raise ThreestepError(
            f"several ranks need the program `deepspeed`, which is neither next to {sys.executable} nor on PATH:"
            " install the package (pip install -c constraints.txt -e .)"
        )
    return program


def _installed_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


if __name__ == "__main__":
    run_program(main, output_is_log=True)
