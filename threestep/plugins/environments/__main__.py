"""Environments outside training: list them, play one conversation in the terminal, or check one before a run.

    threestep inspect env list [FILE.py | FOLDER ...]
    threestep inspect env try examples/environments/guessing.py:Guessing --row '{"ground_truth": "20"}'
    threestep inspect env try my_game.py:Game --data_path jsonl:rows.jsonl --model_name_or_path runs/sft/model
    threestep inspect env check my_game.py:Game --data_path jsonl:rows.jsonl --html game.html

In `try`, you type the model's turns, or a model draws them; with a model folder, both show the tokens with the mask
that step 3 trains on. `check` plays conversations of nonsense and of the right answer. It tests whether a conversation
repeats with its seed and is independent of the conversations beside it, which rewards are paid, how long everything
takes, what fails, and whether the model's input contains the answer. Exit code 1: something is wrong.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from threestep.plugins.environments.arguments import EnvironmentArguments, OpeningRowArguments
from threestep.plugins.environments.conversation_arguments import ConversationArguments
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.data.arguments import AnswerDataArguments, ShownArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import AUTO, flag, flag_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import RolloutEngineFlags
from training.utils.models.arguments import ModelArguments
from training.utils.plugins.registry import plugin_module
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    from threestep.plugins.environments.loading import Environments

LIST, TRY, CHECK = TASKS = ("list", "try", "check")
WRONG_EXIT_CODE = 1
LONGEST_TOKENS = 8192  # of a conversation, of engines whose cache must hold the longest


@dataclass
class EnvArguments:
    """The task, and its environment and rows."""

    topic: ClassVar[str] = "task"

    task: str = flag(LIST, "Task to run; it may come first, without the flag.", choices=TASKS)
    places: list[str] = flag(
        [], "`list`: files and folders to search, which may follow `list` directly; default: this folder.", "file"
    )
    model_name_or_path: str = flag_of(
        ModelArguments,
        "`try`: the model that acts (a folder or a hub name); with --by_hand, only its tokenizer is used. Default: "
        "you act, and no tokens are shown.",
        aliases=["--model"],
    )
    by_hand: bool = flag(False, "`try`: you act, and tokens are shown with the tokenizer of --model_name_or_path.")
    row: str | None = flag_of(
        OpeningRowArguments, "Columns of the row that opens the environment, as a JSON object, instead of --data_path."
    )
    rows: int = flag_of(ShownArguments,
        "Number of rows from --data_path: `check` plays all scripts on each; `try` uses the last.",
                        default=4, takes="rows >= 1")  # fmt: skip
    reward_range: list[float] = flag(
        [], "`check`: the smallest and largest reward that a conversation may have.", "number"
    )
    json: bool = flag_of(ShownArguments, "`check`: print one JSON object instead of text.")
    html: str = flag_of(ShownArguments, "`check`: also write the findings to this HTML file.")
    seed: int = flag_of(RunArguments, "Seed of the environment, of sampling, and of generated datasets.")

    def validate(self, mistakes: Mistakes) -> None:
        wanted = self.reward_range
        mistakes.require(
            not wanted or (len(wanted) == 2 and wanted[0] <= wanted[1]),
            f"--reward_range expects two numbers, the smaller one first, got {' '.join(map(str, wanted))}",
        )
        of_task = {TRY: ("model_name_or_path", "by_hand"), CHECK: ("reward_range", "json", "html"), LIST: ("places",)}
        for task, names in of_task.items():
            for name in names:
                mistakes.require(
                    task == self.task or not getattr(self, name),
                    f"--{name} is for `{task}`, but the task is `{self.task}`; remove --{name}",
                )
        mistakes.require(
            not self.by_hand or bool(self.model_name_or_path),
            "--by_hand needs --model_name_or_path; without both flags, you act and no tokens are shown",
        )


@dataclass
class EnvFlags:
    """All settings, in the order of GROUPS."""

    env: EnvArguments = field(default_factory=EnvArguments)
    environment: EnvironmentArguments = field(default_factory=EnvironmentArguments)
    conversation: ConversationArguments = field(default_factory=ConversationArguments)
    sampling: SamplingArguments = field(default_factory=SamplingArguments)
    engines: RolloutEngineFlags = field(default_factory=RolloutEngineFlags)
    data: AnswerDataArguments = field(default_factory=AnswerDataArguments)


GROUPS = (
    EnvArguments, EnvironmentArguments, ConversationArguments, SamplingArguments, RolloutEngineFlags,
    AnswerDataArguments,
)  # fmt: skip
# What a first run needs, in the order of `--help`.
FIRST_FLAGS = (
    *("environment", "tools", "data_path", "model_name_or_path", "by_hand", "row", "rows", "reward_range", "max_turns"),
    *("max_new_tokens", "temperature", "seed", "html", "json", "config"),
)


def main(argv: Sequence[str]) -> None:
    """Parse, then list, play or check."""
    flags = EnvFlags(*parse_arguments(GROUPS, with_flags(argv), __doc__ or "", first_flags=FIRST_FLAGS))
    if flags.env.task == LIST:
        return show_list(flags.env.places or ["."])
    from threestep.plugins.environments.rows import rows_of

    if not flags.environment.is_on:
        raise ThreestepError(
            f"threestep inspect env {flags.env.task} needs an environment: FILE.py:NAME, or the name of an installed "
            "one; `threestep inspect env list` lists them"
        )
    if flags.env.html:
        check_place("--html", flags.env.html)
    mistakes = Mistakes()
    environments = _loaded(flags, mistakes)
    rows = rows_of(flags.env.row, flags.data, flags.env.rows, flags.env.seed)
    for row in rows:
        environments.name_of(row)
    (try_it if flags.env.task == TRY else check_it)(flags, environments, rows)


def with_flags(argv: Sequence[str]) -> list[str]:
    """Give the words before the first flag their flags: the task, and its environment or places."""
    count = next((place for place, word in enumerate(argv) if word.startswith("-")), len(argv))
    words, rest = list(argv[:count]), list(argv[count:])
    if not words:
        return rest
    task, *named = words
    if task not in TASKS:
        raise ThreestepError(
            f"threestep inspect env expects one of {', '.join(TASKS)} first, got '{task}'{nearest_names(task, TASKS)}"
        )
    if task == LIST:
        return ["--task", task, *(["--places", *named] if named else []), *rest]
    return ["--task", task, *(["--environment", ",".join(named)] if named else []), *rest]


def show_list(places: Sequence[str]) -> None:
    """Print a line for each environment."""
    from threestep.plugins.environments.listing import listed

    found = listed(places)
    for each in found:
        print(f"{each.address}  {each.about}".rstrip())
    if not found:
        note(
            f"no class with reset, step and close in {', '.join(places)}, and no installed package offers environments"
        )


def check_it(flags: EnvFlags, environments: Environments, rows: Sequence[dict[str, Any]]) -> None:
    """Check, print the findings, write the page."""
    from threestep.plugins.environments.findings import Check, check
    from threestep.plugins.environments.text import as_json, as_lines, page

    env = flags.env
    wanted = (env.reward_range[0], env.reward_range[1]) if env.reward_range else None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what an environment prints
            checked = check(environments, Check(rows, env.seed, flags.conversation.max_turns, wanted))
    finally:
        environments.close()
    name = ", ".join([*flags.environment.environment_addresses, *flags.environment.tool_addresses])
    if env.html:
        Path(env.html).write_text(page(name, checked), encoding="utf-8", errors="replace")
        note(f"written: {env.html}")
    if env.json:
        print(json.dumps(as_json(name, checked)))
    else:
        print("\n".join(as_lines(name, checked)))
    if not checked.is_good:
        sys.exit(WRONG_EXIT_CODE)


def try_it(flags: EnvFlags, environments: Environments, rows: Sequence[dict[str, Any]]) -> None:
    """Play one conversation."""
    from threestep.plugins.environments.calling.parsers import parser_of
    from threestep.plugins.environments.playing import any_form, play_by_hand, token_lines

    row, seed = rows[-1], flags.env.seed
    episode = environments.episode(row, seed, warn=note)
    if episode is None:
        raise ThreestepError(
            "the row's column 'environment' is empty, so the row has no environment; pass another --row"
        )
    try:
        if not flags.env.model_name_or_path:
            given = flags.environment.tool_parser
            parser = any_form if given == AUTO else parser_of(given, None)
            play_by_hand(episode, parser, flags.conversation.max_turns, _typed_line, tell=print)
            return
        rollout, tokenizer = _played(flags, episode, row)
    except EOFError:
        note("left before the end of the conversation")
        return
    finally:
        environments.close()
    decode: Any = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    print("\n".join(token_lines(rollout, decode)))


def _played(flags: EnvFlags, episode: Any, row: dict[str, Any]) -> tuple[Any, Any]:
    """The rollout of a conversation, and its tokenizer."""
    from threestep.plugins.environments.acting import ActingSettings, acting_engine
    from threestep.plugins.environments.playing import HandEngine, hand_sampling, play, request_of

    env, limits, of_models = flags.env, flags.conversation, plugin_module("evaluation", "model")
    most = flags.data.rows.max_prompt_seq_len
    if env.by_hand:
        folder = of_models.open_chat_folder(env.model_name_or_path, flags.data)
        tokenizer, chat, model, device = folder.tokenizer, folder.data.chat, None, "cpu"
        ends: tuple[int, ...] = (folder.end_token_id,)
        engine: Any = HandEngine(partial(tokenizer.encode, add_special_tokens=False), _typed_line)
        sampling = hand_sampling(flags.sampling.max_new_tokens, ends, tokenizer.pad_token_id)
    else:
        rank = of_models.start_alone()
        acts = {"environment": flags.environment.environment or flags.environment.tools}
        start_engine = of_models.engine_maker(flags.sampling, flags.engines, LONGEST_TOKENS, more=acts)
        chat_model = of_models.load_chat_model(
            env.model_name_or_path, flags.sampling.dtype, flags.data, rank.device, start_engine=start_engine
        )
        tokenizer, chat, model, engine = (
            chat_model.tokenizer, chat_model.data.chat, chat_model.model, chat_model.engine
        )  # fmt: skip
        ends, sampling, device = chat_model.end_token_ids, chat_model.sampling(flags.sampling), str(model.device)
    settings = ActingSettings(chat, flags.environment, limits, most)

    def acting(drawn_by: Any, partner_of: Any) -> Any:
        return acting_engine(drawn_by, partner_of, settings, tokenizer, end_token_ids=ends)

    says = None if env.by_hand else "model"
    request = request_of(row, env.seed, sampling, device)
    return play(acting, engine, request, episode, model=model, tell=print, says=says), tokenizer


def _loaded(flags: EnvFlags, mistakes: Mistakes) -> Environments:
    from threestep.plugins.environments.loading import load_environments

    flags.conversation.require_partner(True, mistakes)
    environments = load_environments(flags.environment, mistakes)
    mistakes.raise_if_any()
    assert environments is not None
    return environments


def _typed_line() -> str:
    """A line of the person. EOFError at the end of input, and for /quit."""
    line = input("you> " if sys.stdin.isatty() else "")
    if line.strip() == "/quit":
        raise EOFError
    return line


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
