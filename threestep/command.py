"""The console command: a word for each program of `training`, run here, or on several ranks.

    threestep sft --model_name_or_path DIR --data_path jsonl:rows.jsonl --output_dir OUT --num_ranks 2

Cheap to import: `threestep sft --help` waits for it. Knows of the programs their names alone.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from threestep.apart import is_apart, run_module
from training import __version__
from training.utils.base.console import ends_with_its_reader
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.typed import COMMAND_VARIABLE

# Who takes --num_ranks: the launcher, which starts ranks; a program that starts others, by a variable; nobody.
LAUNCHED, HANDED_ON, ALONE = "launched", "handed on", "alone"
_MISTAKE_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130
_HELP = ("-h", "--help")


@dataclass(frozen=True)
class Program:
    """module: as `python -m` takes it. does: for the list of commands. ranks: by default, where ranks are LAUNCHED;
    None: one for each visible GPU, or one. flags: that stand before the user's."""

    module: str
    does: str
    takes_ranks: str = ALONE
    ranks: int | None = None
    flags: tuple[str, ...] = ()


PROGRAMS = {
    "sft": Program("training.step1_sft.main", "supervised fine-tuning on chosen responses", LAUNCHED),
    "reward": Program("training.step2_reward.main", "a reward model from pairs of responses", LAUNCHED),
    "dpo": Program("training.step2_dpo.main", "direct preference optimization on pairs of responses", LAUNCHED),
    "ppo": Program("training.step3_ppo.main", "PPO, GRPO and relatives on prompts", LAUNCHED),
    "grpo": Program("training.step3_ppo.main", "ppo --advantage grpo", LAUNCHED, flags=("--advantage", "grpo")),
    "rloo": Program("training.step3_ppo.main", "ppo --advantage rloo", LAUNCHED, flags=("--advantage", "rloo")),
    "all": Program("training.all_steps", "several steps from one YAML file", HANDED_ON),
    "chat": Program("training.chat", "talk with one model, or with two side by side"),
    "serve": Program("training.serve", "one model for programs, as an endpoint in OpenAI's form"),
    "serve-reward": Program("training.serve_reward", "a reward model for programs, over HTTP"),
    "serve-training": Program("training.serve_training", "LoRA for loops of others: a server of the Tinker API"),
    "evaluate": Program(
        "training.evaluate",
        "win rate, reward, GSM8K or perplexity of a model; a reward model on a benchmark",
        LAUNCHED,
        ranks=1,
    ),
    "best-of": Program("training.best_of", "the best of n responses, as rows for sft and dpo", LAUNCHED, ranks=1),
    "preview": Program("training.preview", "the rows of a run, as a model is fed them"),
    "env": Program("training.env", "environments: a list, one conversation in the terminal, a check before a run"),
    "inspect": Program("training.inspect", "what data are taken for, before training"),
    "plan": Program("training.plan", "the best settings for a model on so many GPUs, and their cost, before a run"),
    "audit": Program("training.audit", "which number of a training step is wrong, and why; where two runs part"),
    "explain": Program("training.explain", "what one optimizer step did, token by token, and under other rules"),
    "report": Program("training.report", "one page about a run, or about several"),
    "export": Program("training.export", "a model folder from a checkpoint"),
    "new-model": Program("training.new_model", "a small model with random weights and its tokenizer"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program that the first word names, with the flags after it. argv: by default this process's."""
    words = list(sys.argv[1:] if argv is None else argv)
    with ends_with_its_reader():
        _answer(words)


def _answer(words: Sequence[str]) -> None:
    if not words or words[0] in _HELP:
        print(overview())
    elif words[0] in ("-V", "--version"):
        print(f"threestep {__version__}")
    else:
        try:
            run(words[0], words[1:])
        except ThreestepError as mistake:
            print(f"error: {mistake}", file=sys.stderr)
            sys.exit(_MISTAKE_EXIT_CODE)
        except KeyboardInterrupt:  # while the program is imported; it answers one itself later
            print("error: stopped by Ctrl-C", file=sys.stderr)
            sys.exit(_INTERRUPTED_EXIT_CODE)


def overview() -> str:
    """The list of commands."""
    width = max(map(len, PROGRAMS))
    lines = [f"  {word:<{width}}  {program.does}" for word, program in PROGRAMS.items()]
    return "\n".join(
        [
            "usage: threestep COMMAND [flags]",
            "",
            *lines,
            "",
            "threestep COMMAND --help lists the flags. --num_ranks N trains on N ranks (one for each GPU, or one).",
        ]
    )


def run(word: str, arguments: Sequence[str]) -> None:
    """Run one program. Ends this process with its code if that is not 0. ThreestepError for an unknown word."""
    if word not in PROGRAMS:
        raise ThreestepError(
            f"threestep expects a command, one of {', '.join(PROGRAMS)}, got '{word}'{nearest_names(word, PROGRAMS)}"
        )
    program = PROGRAMS[word]
    arguments = [*program.flags, *arguments]
    os.environ[COMMAND_VARIABLE] = f"threestep {word}"
    if any(word.partition("=")[0] in _HELP for word in arguments) or program.takes_ranks == ALONE:
        _run_here(program.module, arguments)
    elif program.takes_ranks == HANDED_ON:
        from training.utils.compat.launcher_flags import as_variables

        arguments, variables, lines = as_variables(arguments, os.environ)
        for line in lines:
            print(line, flush=True)
        os.environ.update(variables)
        _run_here(program.module, arguments)
    else:
        from training.utils.run.launch import launch

        code = launch(program.module, arguments, program.ranks, here=lambda own: _run_here(program.module, own))
        if code:
            sys.exit(code)


def _run_here(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m MODULE ARGUMENTS` in this process."""
    if is_apart():
        run_module(module, arguments)
    else:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
