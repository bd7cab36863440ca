"""Chats with one model, or with two side by side; answers are streamed and, on request, scored.

    threestep chat runs/ppo/model
    threestep chat runs/sft/model runs/ppo/model --reward_model runs/reward/model
    threestep chat runs/sft/model --image chart.png
    threestep chat runs/acting/model --tools my_tools.py:weather,my_tools.py:add
    echo "Sort: owl fox" | threestep chat runs/ppo/model --temperature 0 --rollout_engine vllm

If standard input is not a terminal, it is read as one question, and only the answer goes to standard output. /help
lists the commands. --web serves a page that only this machine can open.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from threestep.plugins.evaluation.arguments import (
    END_OF_ANSWER_TEXT,
    OF_TRAINING,
    PROMPT_STYLE_TEXT,
    TEMPLATE_KWARGS_TEXT,
    EvaluateArguments,
)
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.rows.arguments import ChatArguments
from training.utils.flags.added import AddedFlags, added_flags
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag, flag_of, settings_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.partners import all_partners, partners_of
from training.utils.generation.table import RolloutEngineFlags
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.models.arguments import ModelArguments, with_flag
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from threestep.plugins.evaluation.talk import Talk

LONGEST_TOKENS = 8192  # of a conversation, of engines whose cache must hold the longest


@dataclass
class TalkArguments:
    """The models to chat with, and their prompt style."""

    topic: ClassVar[str] = "task"

    model_name_or_path: list[str] = flag_of(
        ModelArguments,
        "One or two model folders or hub names; these may come first, without the flag.",
        default=[],
        aliases=["--path"],
    )
    reward_model: str | None = flag_of(
        EvaluateArguments, "Score each answer with this reward model: a folder or a hub name."
    )
    image: list[str] = flag([], "Images to send with the first message, for models that accept images.", "file")
    system: str = flag("", "System prompt.", "text")
    prompt_style: str = flag_of(ChatArguments, PROMPT_STYLE_TEXT)
    chat_template_kwargs: str | None = flag_of(ChatArguments, TEMPLATE_KWARGS_TEXT)
    end_of_conversation_token: str | None = flag_of(ChatArguments, END_OF_ANSWER_TEXT)
    seed: int = flag_of(RunArguments, "Sampling seed; the same seed gives the same answers.")
    web: bool = flag(
        False,
        "Serve a web page on 127.0.0.1 instead of the terminal; the printed address includes its access token (needs "
        "the package gradio).",
    )
    web_port: int = flag(7860, "Port for --web; the default is Gradio's default port.", "1 <= port <= 65535")

    def validate(self, mistakes: Mistakes) -> None:
        got = len(self.model_name_or_path)
        mistakes.require(got in (1, 2), f"expected one or two models, got {got}; put MODEL [MODEL2] before the flags")
        self.text.validate(mistakes)

    @property
    def text(self) -> ChatArguments:
        """The settings by which messages become text."""
        return settings_of(ChatArguments, self, defaults=OF_TRAINING)


GROUPS = (TalkArguments, SamplingArguments, RolloutEngineFlags, added_flags("chat"))


class ChatFlags(NamedTuple):
    """All settings, in the order of GROUPS."""

    chat: TalkArguments
    sampling: SamplingArguments
    engines: RolloutEngineFlags
    added: AddedFlags = AddedFlags()

    @property
    def data(self) -> DataArguments:
        """The settings by which messages become tokens."""
        return DataArguments(chat=self.chat.text, forms=self.added)


def main(argv: Sequence[str]) -> None:
    """Parse, load, chat."""
    flags = ChatFlags(*parse_arguments(GROUPS, with_flag(argv), __doc__ or ""))
    chat = flags.chat
    check_partners(flags)
    for path in (*chat.model_name_or_path, *([chat.reward_model] if chat.reward_model is not None else [])):
        check_model_folder(path)
    if chat.web:
        from threestep.plugins.evaluation.web import check_page, serve

        check_page(chat.web_port)
        serve(loaded(flags), chat.web_port, lambda address: print(address, flush=True))
    elif sys.stdin.isatty():
        converse(loaded(flags)())
    else:
        talk = loaded(flags)()
        answer_once(talk, as_typed(talk, sys.stdin.read().removesuffix("\n")))


def check_partners(flags: ChatFlags) -> None:
    """ThreestepError for flags that do not go with somebody who answers the models."""
    mistakes, partners = Mistakes(), partners_of(flags.added)
    form = flags.data.form
    for name, is_there in ((form and form.flag, form is not None), ("--reward_model", flags.chat.reward_model)):
        mistakes.require(
            not (partners.is_there and is_there),
            f"{name} supports only single-turn responses, not conversations with {partners.flag.replace(',', ' or')}; "
            "remove one of them",
        )
    for each in all_partners(flags.added):
        each.check(mistakes)
    mistakes.raise_if_any()


def loaded(flags: ChatFlags) -> Callable[[], Talk]:
    """Load the models once; return a function that starts a conversation with them."""
    from threestep.plugins.evaluation.acting import check_acting, load_partners
    from threestep.plugins.evaluation.model import engine_maker, load_chat_model, start_alone
    from threestep.plugins.evaluation.scorer import load_answer_scorer, why_unscored
    from threestep.plugins.evaluation.talk import Talk
    from training.utils.generation.table import engine_class

    chat, sampling, partners = flags.chat, flags.sampling, partners_of(flags.added)
    columns, acting = dict(partners.columns), load_partners(partners)
    rank, data = start_alone(), flags.data
    more = partners.engine_flags
    start_engine = engine_maker(sampling, flags.engines, LONGEST_TOKENS, data.form, more=more)
    reads_media = engine_class(sampling.rollout_engine).supports_media
    models = [
        load_chat_model(path, sampling.dtype, data, rank.device, start_engine=start_engine, with_media=reads_media)
        for path in chat.model_name_or_path
    ]
    if acting is not None:
        check_acting(acting, models)
    scorer = None
    if chat.reward_model is not None:
        sides = [(model.tokenizer, model.reads.reader) for model in models if model.reads is not None]
        unread = why_unscored(chat.reward_model, sides)
        seen = [model.media for model in models if model.media is not None and unread is None]
        scorer = load_answer_scorer(
            chat.reward_model, sampling.dtype, data, rank, media=next(iter(seen), None), unread=unread
        )

    def begun() -> Talk:
        talk = Talk(models, sampling, chat.seed, scorer, chat.system, acting, columns)
        for path in chat.image:
            note(talk.attach(path))
        return talk

    return begun


def converse(talk: Talk) -> None:
    """Read lines until /quit or the end of input; Ctrl-C stops an answer."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and editing

    names = " and ".join(model.name for model in talk.models)
    print(f"{names}; type /help for the commands, /quit to end")
    if talk.scorer is not None:
        from threestep.plugins.evaluation.talk import SCORES_COMPARE

        print(SCORES_COMPARE)
    while True:
        try:
            line = as_typed(talk, input(f"\n{asks(talk)}> "))
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        try:
            reply = talk.enter(line)
            if reply.text:
                print(reply.text)
            if reply.end:
                return
            for place in range(len(talk.models) if reply.answer else 0):
                show_answer(talk, place)
        except KeyboardInterrupt:
            print(" (stopped)")
        except ThreestepError as mistake:
            print(f"error: {mistake}")
        talk.drop_turn()


def as_typed(talk: Talk, line: str) -> str:
    """The question in a line, without the white space around it unless models read that as stored; "" of a blank
    line."""
    stripped = line.strip()
    reads_ends = all(model.reads_as_stored for model in talk.models)
    return line if reads_ends and stripped and not stripped.startswith("/") else stripped


def asks(talk: Talk) -> str:
    """The prompt of an input line: `you`, with the number of pictures that wait for the message."""
    count = len(talk.waiting)
    return "you" if not count else f"you, with {count} picture{'s' * (count > 1)}"


def show_answer(talk: Talk, place: int) -> None:
    """Print model `place`'s answer as it grows, then its note and its score."""
    label = "model" if len(talk.models) == 1 else f"{'AB'[place]} {talk.models[place].name}"
    print(f"{label}> ", end="", flush=True)
    print("" if print_answer(talk, place) else " (cut)")
    note = talk.note(place)
    if note:
        print(f"  {note}")
    score = talk.score(place)
    if score is not None:
        print(f"  score {score:.3f}")


def print_answer(talk: Talk, place: int) -> bool:
    """Print model `place`'s answer as it grows; return False if it was cut."""
    shown, ended = "", True
    for answer in talk.answer(place):
        text = talk.models[place].message_text(answer)
        print(text[len(shown) :], end="", flush=True)
        shown, ended = text, answer.ended
    return ended


def answer_once(talk: Talk, question: str) -> None:
    """Print the answer to one question, those of two models each below its name. Notes and scores go to standard
    error."""
    if not question:
        raise ThreestepError(
            "standard input is empty and not a terminal; pipe a question in: echo QUESTION | threestep chat MODEL"
        )
    talk.ask(question)
    for place, model in enumerate(talk.models):
        if len(talk.models) > 1:
            print(f"== {'AB'[place]} {model.name}")
        print_answer(talk, place)
        print()
        note = talk.note(place)
        if note:
            print(f"answer of {model.name}: {note}", file=sys.stderr)
        score = talk.score(place)
        if score is not None:
            print(f"score of {model.name}: {score:.3f}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
