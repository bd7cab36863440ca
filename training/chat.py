"""Talks with a model, or with two side by side; answers are written as they are drawn, and scored where asked.

    python -m training.chat runs/ppo/model
    python -m training.chat runs/sft/model runs/ppo/model --reward_model runs/reward/model
    echo "Sort: owl fox" | python -m training.chat runs/ppo/model --temperature 0 --rollout_engine vllm

Where standard input is no terminal it is one question, and the answer alone is written to standard output. /help lists
the commands. --web serves a page to this machine alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from training.asking.arguments import SamplingArguments
from training.step3_ppo.vllm_arguments import VllmArguments
from training.utils.data.arguments import PROMPT_STYLES, DataArguments
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import Mistakes, ThreestepError
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from training.asking.talk import Talk

AUTO = "auto"
LONGEST_VLLM_TOKENS = 8192  # of a conversation by vLLM, which must have room for the longest in its cache


@dataclass
class ChatArguments:
    """Who is asked, and how."""

    model_name_or_path: list[str] = field(
        default_factory=list, metadata={"help": "One model folder or hub name, or two; may stand first without flag."}
    )
    reward_model: str | None = field(default=None, metadata={"help": "Score each answer by this reward model."})
    system: str = field(default="", metadata={"help": "A system prompt."})
    prompt_style: str = field(
        default=AUTO,
        metadata={
            "help": "human_assistant ('Human: ... Assistant:'), chat_template, or auto: the chat template where the "
            "tokenizer has one."
        },
    )
    end_of_conversation_token: str | None = field(
        default=None, metadata={"help": "As in training; default: the tokenizer's eos, or the chat template's."}
    )
    seed: int = field(default=RunArguments.seed, metadata={"help": "The same seed gives the same answers."})
    web: bool = field(default=False, metadata={"help": "Serve a page on 127.0.0.1 (needs the package gradio)."})
    web_port: int = field(default=7860, metadata={"help": "Port of --web; the default is Gradio's."})

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        got = len(self.model_name_or_path)
        mistakes.require(got in (1, 2), f"expected one model or two, got {got}: MODEL [MODEL2] before the flags")
        styles = (AUTO, *PROMPT_STYLES)
        mistakes.require(
            self.prompt_style in styles, f"--prompt_style expects one of {', '.join(styles)}, got '{self.prompt_style}'"
        )
        mistakes.require(self.seed >= 0, f"--seed expects a number from 0 up, got {self.seed}")
        mistakes.require(1 <= self.web_port <= 65535, f"--web_port expects a port from 1 to 65535, got {self.web_port}")


GROUPS = (ChatArguments, SamplingArguments, VllmArguments)


def main(argv: Sequence[str]) -> None:
    """Parse, load, talk."""
    chat, sampling, vllm = parse_arguments(GROUPS, with_flag(argv), __doc__ or "")
    if chat.web:
        from training.asking.web import serve

        serve(loaded(chat, sampling, vllm), chat.web_port)
        return
    talk = loaded(chat, sampling, vllm)()
    if sys.stdin.isatty():
        converse(talk)
    else:
        answer_once(talk, sys.stdin.read().strip())


def with_flag(argv: Sequence[str]) -> list[str]:
    """The words before the first flag are the models."""
    words = 0
    while words < len(argv) and not argv[words].startswith("-"):
        words += 1
    return ["--model_name_or_path", *argv[:words], *argv[words:]] if words else list(argv)


def loaded(chat: ChatArguments, sampling: SamplingArguments, vllm: VllmArguments) -> Callable[[], Talk]:
    """Load the models once; return what begins conversations with them."""
    import torch
    from transformers.utils import logging

    from training.asking.engines import chosen
    from training.asking.model import load_asked_model
    from training.asking.scorer import load_answer_scorer
    from training.asking.talk import Talk
    from training.utils.engine.startup import Ranks

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    drawing = chosen(sampling.rollout_engine, vllm, LONGEST_VLLM_TOKENS)
    models = [
        load_asked_model(path, sampling.dtype, data_for(chat, path), device, drawing)
        for path in chat.model_name_or_path
    ]
    scorer = None
    if chat.reward_model is not None:
        style = data_for(chat, chat.reward_model)
        scorer = load_answer_scorer(chat.reward_model, sampling.dtype, style, Ranks(0, 0, 1, device))

    def new_talk() -> Talk:
        talk = Talk(models, sampling, chat.seed, scorer)
        talk.system = chat.system
        return talk

    return new_talk


def data_for(chat: ChatArguments, path: str) -> DataArguments:
    """The prompt style of the model at `path` as the data room's flags."""
    from training.utils.models.loading import load_tokenizer

    style = chat.prompt_style
    if style == AUTO:
        style = "chat_template" if load_tokenizer(path, end_may_pad=True).chat_template else "human_assistant"
    return replace(DataArguments(), prompt_style=style, end_of_conversation_token=chat.end_of_conversation_token)


# The terminal.


def converse(talk: Talk) -> None:
    """Read lines until /quit or the end of input; Ctrl-C stops an answer."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() gains a history and editing

    names = " and ".join(asked.name for asked in talk.models)
    print(f"{names}; /help lists the commands, /quit ends")
    while True:
        try:
            line = input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                reply = talk.command(line)
                if reply.say:
                    print(reply.say)
                if reply.end:
                    return
                if not reply.answer_again:
                    continue
            else:
                talk.ask(line)
            for place in range(len(talk.models)):
                show_answer(talk, place)
        except KeyboardInterrupt:
            print(" (stopped)")
        except ThreestepError as mistake:
            print(f"error: {mistake}")
        talk.drop_turn()


def show_answer(talk: Talk, place: int) -> None:
    """Write model `place`'s answer as it grows, its score behind."""
    label = "model" if len(talk.models) == 1 else f"{'AB'[place]} {talk.models[place].name}"
    print(f"{label}> ", end="", flush=True)
    shown = ""
    ended = True
    for answer in talk.answer(place):
        text = answer.text.lstrip()
        print(text[len(shown) :], end="", flush=True)
        shown, ended = text, answer.ended
    print("" if ended else " (cut)")
    score = talk.score(place)
    if score is not None:
        print(f"  score {score:.3f}")


def answer_once(talk: Talk, question: str) -> None:
    """Answer one question on standard output; of two models, each under its name. Scores go to standard error."""
    if not question:
        raise ThreestepError("standard input is no terminal and holds no question; write one to it")
    talk.ask(question)
    for place, asked in enumerate(talk.models):
        if len(talk.models) > 1:
            print(f"== {'AB'[place]} {asked.name}")
        shown = ""
        for answer in talk.answer(place):
            text = answer.text.lstrip()
            print(text[len(shown) :], end="", flush=True)
            shown = text
        print()
        score = talk.score(place)
        if score is not None:
            print(f"score of {asked.name}: {score:.3f}", file=sys.stderr)


if __name__ == "__main__":
    # transformers loads deepspeed where it is installed, which then looks for a device; nothing here runs on it.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_program(main)
