"""Shows how your data will be read, and what the model will be trained on, before any training.

    threestep inspect --data_path jsonl:rows.jsonl --model_name_or_path DIR --html data.html

Prints the recognized format and the reason for it, the columns that are read and those that are not, the rows that each
step gets, the prompt style and the end token, lengths, which rows are cut, dropped or without loss and why, and rows as
the model sees them. Use the data flags of your run. Without a model, lengths are in characters. Nothing is cached or
changed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import PHASES, DataArguments, ShownArguments
from training.utils.data.rows.arguments import CHAT_TEMPLATE, HUMAN_ASSISTANT
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag, flag_of
from training.utils.models.arguments import ModelArguments
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import check_place

ALL = "all"


@dataclass
class InspectArguments:
    """The data to look at, and the form of the output."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        ModelArguments,
        "Model or tokenizer (a folder or hub name) that provides the chat template, the end token and lengths in "
        "tokens.",
        aliases=["--tokenizer"],
    )
    phase: str = flag_of(
        ShownArguments,
        "1 (SFT), 2 (reward model or DPO), 3 (PPO's prompts), or all.",
        default=ALL,
        choices=(ALL, *PHASES),
    )
    rows: int = flag_of(ShownArguments, "Rows to show per step.")
    look_at: int = flag(2_000, "Rows to tokenize per step, picked with the seed.", "rows >= 1")
    json: bool = flag_of(ShownArguments, "Print one JSON object instead of text.")
    html: str = flag_of(ShownArguments)
    seed: int = flag_of(RunArguments, "The run's seed, which decides the split.")
    pad_token: str | None = flag_of(ModelArguments, "As in training; not needed here.")


GROUPS = (InspectArguments, DataArguments)


def main(argv: Sequence[str]) -> None:
    """Parse, look, show; what training would refuse is shown too, and then ends the program as it would end the run."""
    # Keeps what a dataset's code or a library prints out of the account.
    with redirect_stdout(sys.stdout if {"-h", "--help"} & set(argv) else sys.stderr):
        inspect, data = parse_arguments(GROUPS, argv, __doc__ or "")
        if inspect.html:
            check_place("--html", inspect.html)
        account = look(inspect, data)
    _show(inspect, account)
    if account.refused is not None:
        raise ThreestepError(account.refused)


def look(inspect: InspectArguments, data: DataArguments) -> Any:
    """The account that the flags ask for."""
    from threestep.plugins.inspect.account import Look, account_of
    from threestep.plugins.inspect.characters import Characters
    from training.utils.data.build.build import settle_style
    from training.utils.data.chat.style import adopt_style
    from training.utils.setup.media import reader_of_folder, why_unread

    phases = (1, 2, 3) if inspect.phase == ALL else (int(inspect.phase),)
    extent = Look(phases, inspect.rows, inspect.look_at, inspect.seed)
    if inspect.model_name_or_path:
        tokenizer = _load(inspect, data)
        style = adopt_style(tokenizer, data.chat)
        reader = reader_of_folder(inspect.model_name_or_path, tokenizer)
        extent = replace(extent, unread=why_unread(inspect.model_name_or_path))

        def settled(rows: Sequence[Any]) -> str:
            warnings: list[str] = []
            found = settle_style(style, rows, tokenizer, warnings.append, most_tokens=data.rows.max_seq_len)
            return "; ".join([found.sentence, *(line for line in warnings if line != found.sentence)])

        return account_of(replace(data, chat=style.chat), extent, tokenizer, settled, has_ids=True, reader=reader)
    mistakes = Mistakes()
    for name in _flags_of_a_tokenizer(data):
        mistakes.add(f"{name} needs --model_name_or_path; pass a model, or just its tokenizer")
    mistakes.raise_if_any()
    sentence = (
        "no --model_name_or_path: texts are shown as Human: ... Assistant:, and lengths in characters; pass a model "
        "to see its chat template (if it has one), end token and tokens"
    )
    chat = replace(data.chat, prompt_style=HUMAN_ASSISTANT)
    return account_of(replace(data, chat=chat), extent, Characters(), sentence, has_ids=False)


def _flags_of_a_tokenizer(data: DataArguments) -> list[str]:
    """The flags that are set and have no meaning without a tokenizer."""
    chat = data.chat
    flags = {
        "--prompt_style chat_template": chat.prompt_style == CHAT_TEMPLATE,
        **({} if data.form is None else {data.form.flag: True}),
        "--end_of_conversation_token": chat.end_of_conversation_token is not None,
    }
    return [*(name for name, is_set in flags.items() if is_set), *chat.template_flags]


def _load(inspect: InspectArguments, data: DataArguments) -> Any:
    """The tokenizer with the tokens that training adds."""
    from training.utils.loading.tokenizers import add_tokens, load_tokenizer

    tokenizer = load_tokenizer(inspect.model_name_or_path, inspect.pad_token, end_may_pad=True)
    add_tokens(tokenizer, data.tokens_in_need)
    return tokenizer


def _show(inspect: InspectArguments, account: Any) -> None:
    from threestep.plugins.inspect.page import page
    from threestep.plugins.inspect.text import as_json, as_lines
    from threestep.plugins.inspect.views import terminal_style

    if inspect.html:
        Path(inspect.html).write_text(page(account), encoding="utf-8")
        note(f"written: {inspect.html}")
    if inspect.json:
        print(json.dumps(as_json(account), ensure_ascii=False))
    elif not inspect.html:
        style = terminal_style(sys.stdout.isatty(), shutil.get_terminal_size((120, 24)).columns)
        for line in as_lines(account, style):
            print(line)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
