"""Asks programs whether a command line is theirs, without running them: each parses it for real and is stopped there.

    check_call(["bash", "scripts/step1_sft.sh", "--config", "run.yaml"])     raises WrongCommand where it is wrong
    flags_of("training.step1_sft.main")                                      {"--config", "--data_path", ...}

It knows how the shell scripts, torchrun, `accelerate launch` and DeepSpeed's launcher hand a command line on, and what
a stand-in such as DATA or run.yaml stands for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.rooms import runs_by_itself
from threestep.command import named
from training.utils.base.errors import ThreestepError
from training.utils.flags import arguments as settings
from training.utils.plugins.plugin import ALONE
from training.utils.run.launch import as_variables
from training.utils.setup import step_program

ROOT = Path(__file__).parents[2]
_OF_BENCHMARKS = [
    ROOT / "benchmarks" / name
    for name in ("__main__.py", "gpu_day/__main__.py", "gpu_day/pack.py", "gpu_day/install.py")
]
_PARSING_FUNCTIONS = ("parse_arguments", "_parse")  # a program's own, where it has one

# Programs that are not ours, and are not asked.
FOREIGN = {"cd", "source", "git", "pip", "ssh", "apt-get", "tensorboard", "kill", "wait", "cat", "pre-commit", "curl",
           "vllm", "head", "ls", "sudo", "pytest", "scp", "squeue", "scancel", "export", "lm_eval"}  # fmt: skip
FOREIGN_FILES = {"llama.cpp/convert_hf_to_gguf.py"}
FOREIGN_MODULES = {"pytest", "pip", "venv", "http.server", "ruff", "mypy", "vllm.entrypoints.openai.api_server"}

# What a page writes where the reader has something of his own, and a value that the parser takes for it.
STAND_INS = {"DATA": "embedded", "FOLDER": ".", "MODEL.gguf": "MODEL"}
# What a step needs, where a page leaves it out: behind `...`, or in a file of settings that only the reader has.
NEEDED = {
    "--data_path": "embedded",
    "--model_name_or_path": "MODEL",
    "--actor_model_name_or_path": "MODEL",
    "--critic_model_name_or_path": "MODEL",
}


class WrongCommand(Exception):
    """The sentence that a program would print."""


class _Parsed(Exception):
    """The program has parsed its command line, and goes no further."""


def check_call(words: Sequence[str]) -> None:
    """Raise WrongCommand where a program of ours would refuse these words, or where nobody knows the program."""
    program, rest = words[0], list(words[1:])
    if program in ("python", "python3"):
        _check_python(rest)
    elif program == "bash":
        _check_script(rest)
    elif program == "threestep":
        _check_console(rest)
    elif program in _LAUNCHERS:
        module, arguments = _LAUNCHERS[program](rest)
        check_module(module, arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        _require(set(rest) <= set(targets), f"the Makefile has no {' '.join(rest)}")
    elif program == "sbatch":
        _require(rest[0] == "scripts/slurm.sbatch", f"nobody knows the template {rest[0]}")
        check_module(f"training.{rest[1]}.main", rest[2:])
    else:
        _require(program in FOREIGN, f"nobody knows the program {program}: a slip, or a name for FOREIGN here")


def check_module(module: str, arguments: Sequence[str]) -> None:
    """Raise WrongCommand where `python -m module arguments` would be refused."""
    if module in FOREIGN_MODULES:
        return
    if module == "training.utils.run.launch":
        _require(bool(arguments), "training.utils.run.launch expects a module first")
        return check_module(arguments[0], arguments[1:])
    _require(
        module.split(".")[0] in ("training", "threestep", "benchmarks", "tests"), f"nobody knows the module {module}"
    )
    path = ROOT.joinpath(*module.split("."))
    exists = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    _require(exists, f"there is no module {module}")
    if module in all_programs():  # the others take no flags, and would run
        parse_only(module, _with_settings(module, arguments))


def parse_only(module: str, arguments: Sequence[str]) -> None:
    """Let a program parse `arguments`, and stop it there. Raises WrongCommand with what it says against them."""
    program = _program(module)

    def then_stop(function: Callable[..., Any]) -> Callable[..., Any]:
        def parse(*args: Any, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            raise _Parsed

        return parse

    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name in _PARSING_FUNCTIONS:
            home = _home_of(name, program)
            if home is not None:
                stack.enter_context(patch.object(home, name, then_stop(getattr(home, name))))
        parser = argparse.ArgumentParser
        stack.enter_context(patch.object(parser, "parse_args", then_stop(parser.parse_args)))
        stack.enter_context(patch.object(sys, "argv", [module, *arguments]))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(contextlib.redirect_stdout(said))
        try:
            program.main(*([list(arguments)] if inspect.signature(program.main).parameters else []))
        except _Parsed:
            return
        except ThreestepError as mistake:
            raise WrongCommand(str(mistake)) from mistake
        except SystemExit as end:
            if end.code in (0, None):  # --help
                return
            raise WrongCommand(said.getvalue() or str(end)) from end
    raise AssertionError(f"{module} ran: it parses its command line in a way that this file does not know")


@cache
def flags_of(module: str) -> frozenset[str]:
    """Every flag that a program has, subcommands' and DeepSpeed-Chat's among them."""
    seen: set[str] = set()

    def note(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        _collect(parser, seen)
        raise _Parsed

    program = _program(module)
    home = _home_of("parse_arguments", program)
    if home is not None:
        parsing = home.parse_arguments

        def note_old(groups: Any, argv: Any, description: str, old_flags: Any = None, **others: Any) -> Any:
            seen.update(old_flags or {}, others.get("unread", ()))
            return parsing(groups, argv, description, old_flags, **others)

        stack = patch.object(home, "parse_arguments", note_old)
    else:
        stack = contextlib.nullcontext()
    with stack, patch.object(sys, "argv", [module]):
        # parse_arguments looks for --config first, with a parser of its own that has no help.
        real = argparse.ArgumentParser.parse_known_args

        def parse(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            return note(parser) if "--help" in parser._option_string_actions else real(parser, *args, **kwargs)

        # A program that shows its --help where no words are given would end with it.
        with (
            patch.object(argparse.ArgumentParser, "parse_known_args", parse),
            patch.object(settings, "requested_topic", lambda argv: None),
        ):
            with contextlib.suppress(_Parsed):
                program.main(*([[]] if inspect.signature(program.main).parameters else []))
    return frozenset(seen)


@cache
def all_programs() -> list[str]:
    """Every module that is run by `python -m` and parses a command line; of the benchmarks `_OF_BENCHMARKS`."""
    names = []
    of_plugins = (path for path in ROOT.glob("threestep/plugins/**/*.py") if "tests" not in path.parts)
    for path in [*ROOT.glob("training/**/*.py"), *of_plugins, *_OF_BENCHMARKS]:
        text = path.read_text(encoding="utf-8")
        if runs_by_itself(text) and re.search(r"def main\(|import main$|^main = ", text, re.MULTILINE):
            names.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    return sorted(set(names) - {"training", "training.utils.run.launch"})


def _program(module: str) -> Any:
    """The module that holds the program's main and its parser."""
    path = ROOT.joinpath(*module.split("."))
    found = importlib.import_module(f"{module}.__main__" if (path / "__main__.py").is_file() else module)
    if not hasattr(found, "main") or found.main.__module__ != found.__name__:
        other = re.search(r"from ([\w.]+) import main", inspect.getsource(found))
        assert other is not None or hasattr(found, "main"), f"{module} has no main"
        found = found if other is None else importlib.import_module(other[1])
    return found


def _home_of(name: str, program: Any) -> Any:
    """The module in which the program finds the function `name`, if it calls it."""
    homes = (program, step_program) if hasattr(program, "one_model_program") else (program,)
    return next((home for home in homes if hasattr(home, name)), None)


def _collect(parser: argparse.ArgumentParser, seen: set[str]) -> None:
    for action in parser._actions:
        seen.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _collect(child, seen)


def _check_python(rest: list[str]) -> None:
    if rest[:1] == ["-m"]:
        return check_module(rest[1], rest[2:])
    _require(bool(rest) and rest[0].endswith(".py"), f"python {' '.join(rest)}: a module or a file is expected")
    if rest[0] in FOREIGN_FILES:
        return None
    _require(Path(rest[0]).is_file(), f"there is no file {rest[0]}, here or as a block of the page")


def _check_script(rest: list[str]) -> None:
    script = ROOT / rest[0]
    _require(script.is_file(), f"there is no script {rest[0]}")
    call = re.search(r'^exec "\$PYTHON" -m (.+?)$', re.sub(r"\\\n\s*", "", script.read_text()), re.MULTILINE)
    if call is None:
        return
    handed_on = '"$@"' in call[1]
    _require(handed_on or len(rest) == 1, f"{rest[0]} takes no arguments, got {' '.join(rest[1:])}")
    own = [word for word in shlex.split(call[1]) if "$" not in word or word == "$THREESTEP_ROOT"]
    check_module(own[0], [*own[1:], *rest[1:]])


def _check_console(rest: list[str]) -> None:
    """The console command, whose launcher takes --num_ranks away."""
    if not rest or rest[0] in ("--help", "--version"):
        return
    try:
        _, program, arguments = named(rest)
    except ThreestepError as mistake:
        raise WrongCommand(str(mistake)) from mistake
    check_module(program.module, arguments if program.takes_ranks == ALONE else as_variables(arguments, {})[0])


def _with_settings(module: str, arguments: Sequence[str]) -> list[str]:
    """The words with what a reader's own file of settings, or `...`, would add."""
    words: list[str] = []
    is_incomplete = False
    for word in arguments:
        if (
            words
            and words[-1] == "--config"
            and not Path(word).exists()
            and module != "threestep.plugins.programs.all_steps"
        ):
            _require("--config" in flags_of(module), f"python -m {module} has no --config")
            words.pop()
            is_incomplete = True
        elif word == "...":
            is_incomplete = True
        else:
            words.append(STAND_INS.get(word, word))
    if is_incomplete:
        flags = flags_of(module)
        for flag, value in NEEDED.items():
            if flag in flags and flag not in words:
                words += [flag, value]
    return words


def _torchrun(words: list[str]) -> tuple[str, list[str]]:
    from torch.distributed.run import get_args_parser

    found = _parsed_by(get_args_parser().parse_args, words, "torchrun")
    _require(found.module, "torchrun: expected -m before the step's module")
    return found.training_script, found.training_script_args


def _accelerate(words: list[str]) -> tuple[str, list[str]]:
    from accelerate.commands.launch import launch_command_parser

    _require(words[:1] == ["launch"], f"accelerate {' '.join(words[:1])}: only launch is known here")
    found = _parsed_by(launch_command_parser().parse_args, words[1:], "accelerate launch")
    _require(found.module, "accelerate launch: expected -m before the step's module")
    return found.training_script, found.training_script_args


def _deepspeed(words: list[str]) -> tuple[str, list[str]]:
    from deepspeed.launcher.runner import parse_args

    found = _parsed_by(parse_args, words, "deepspeed")
    _require(found.module, "deepspeed: expected --module before the step's module")
    return found.user_script, found.user_args


def _parsed_by(parse: Callable[[list[str]], Any], words: list[str], program: str) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(words)
    except SystemExit as end:
        raise WrongCommand(f"{program}: {said.getvalue().strip().splitlines()[-1]}") from end


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise WrongCommand(sentence)


_LAUNCHERS = {"torchrun": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}
