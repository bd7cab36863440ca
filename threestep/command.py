"""The console command: a word for each program of `training` and of plugins, run here, or on several ranks.

    threestep sft --model_name_or_path DIR --data_path jsonl:rows.jsonl --output_dir OUT --num_ranks 2

Cheap to import: `threestep sft --help` waits for it. Knows of the programs their names alone.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from threestep.own_package import is_apart, run_module
from training import __version__
from training.utils.base.console import COMMAND_VARIABLE, ends_with_its_reader, note
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.plugins.plugin import ALONE, HANDED_ON, LAUNCHED, Command
from training.utils.plugins.registry import added, owner_sentence

_MISTAKE_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130
_HELP = ("-h", "--help")
_OF_DPO = ("kto", "bco", "orpo", "cpo", "simpo", "ipo")  # losses of dpo that are commands of other programs

# Commands of the core. Plugins add theirs, and may take none of these. A name of two words is a command below another.
CORE_COMMANDS = {
    "sft": Command("training.step1_sft.main", "supervised fine-tuning on chosen responses", LAUNCHED),
    "reward": Command("training.step2_reward.main", "a reward model from pairs of responses", LAUNCHED),
    "dpo": Command("training.step2_dpo.main", "direct preference optimization on pairs of responses", LAUNCHED),
    "ppo": Command(
        "training.step3_ppo.main", "reinforcement learning on prompts: PPO, GRPO and others; also: grpo, rloo", LAUNCHED
    ),
    "grpo": Command("training.step3_ppo.main", "ppo --advantage grpo", LAUNCHED, flags=("--advantage", "grpo")),
    "rloo": Command("training.step3_ppo.main", "ppo --advantage rloo", LAUNCHED, flags=("--advantage", "rloo")),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first one or two words name, with the flags after it. argv: default: this process's."""
    words = list(sys.argv[1:] if argv is None else argv)
    with ends_with_its_reader():
        _answer(words)


def _answer(words: Sequence[str]) -> None:
    try:
        if not words or words[0] in _HELP:
            print(overview())
        elif words[0] in ("-V", "--version"):
            print(f"threestep {__version__}")
        else:
            run(words)
    except ThreestepError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(_MISTAKE_EXIT_CODE)
    except KeyboardInterrupt:  # while the program is imported; it answers one itself later
        print("error: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(_INTERRUPTED_EXIT_CODE)


def commands() -> dict[str, Command]:
    """Return every command by its name: the core's, then the plugins'."""
    return {**CORE_COMMANDS, **added("commands", CORE_COMMANDS)}


def overview() -> str:
    """The list of commands: one line for each, with the commands below it; those that only set a flag have none."""
    known = commands()
    below: dict[str, list[str]] = {}
    for name in known:
        first, _, second = name.partition(" ")
        below.setdefault(first, []).extend([second] if second else [])
    listed = [first for first in below if first not in known or not known[first].flags]
    width = max(map(len, listed))
    lines = []
    for first in listed:
        also = f"also: {', '.join(f'{first} {second}' for second in below[first])}" if below[first] else ""
        does = known[first].does if first in known else ""
        lines.append(f"  {first:<{width}}  {'; '.join(filter(None, (does, also)))}")
    of_core = sum(first in CORE_COMMANDS for first in listed)
    return "\n".join(
        [
            "usage: threestep COMMAND [flags]",
            "",
            *lines[:of_core],
            *(["", "from plugins:", *lines[of_core:]] if lines[of_core:] else []),
            "",
            "threestep COMMAND --help lists the flags. --num_ranks N trains on N ranks; default: one per GPU.",
        ]
    )


def named(words: Sequence[str]) -> tuple[str, Command, list[str]]:
    """Return the name of the command that `words` begin with, the command, and the words after it.

    Raises ThreestepError for an unknown name.
    """
    if words[0] in CORE_COMMANDS:
        return words[0], CORE_COMMANDS[words[0]], [*words[1:]]
    known = commands()
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in known:
            return name, known[name], [*words[count:]]
        if hint := owner_sentence("commands", name.replace(" ", "_")):
            raise ThreestepError(f"there is no command '{name}'{hint}")
    for name, command in known.items():
        if command.earlier == words[0]:
            note(f"`threestep {words[0]}` is now `threestep {name}`")
            return name, command, [*words[1:]]
    first = dict.fromkeys(name.partition(" ")[0] for name in known)
    hint = nearest_names(words[0], first) or f"; commands are {', '.join(first)}"
    hint = f"; use `threestep dpo --loss_type {words[0]}`" if words[0] in _OF_DPO else hint
    raise ThreestepError(f"there is no command '{words[0]}'{hint}")


def run(words: Sequence[str]) -> None:
    """Run one command. Ends this process with its code if that is not 0. ThreestepError for an unknown name."""
    name, command, arguments = named(words)
    arguments = [*command.flags, *arguments]
    os.environ[COMMAND_VARIABLE] = f"threestep {name}"
    if any(word.partition("=")[0] in _HELP for word in arguments) or command.takes_ranks == ALONE:
        _run_here(command.module, arguments)
    elif command.takes_ranks == HANDED_ON:
        from training.utils.run.launch import as_variables

        arguments, variables, lines = as_variables(arguments, os.environ)
        for line in lines:
            print(line, flush=True)
        os.environ.update(variables)
        _run_here(command.module, arguments)
    else:
        from training.utils.run.launch import launch

        code = launch(command.module, arguments, command.ranks, here=lambda own: _run_here(command.module, own))
        if code:
            sys.exit(code)


def _run_here(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m MODULE ARGUMENTS` in this process."""
    if is_apart():
        run_module(module, arguments)
    else:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
