"""A conversation with one model or two, and the commands that steer it. Knows no terminal and no web page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.asking.arguments import SamplingArguments
from training.asking.model import Answer, AskedModel, prompt_of, stream_answer
from training.asking.scorer import Scorer
from training.utils.data.message_forms import Message
from training.utils.models.loading import same_tokenizer
from training.utils.run.errors import Mistakes, ThreestepError, nearest_names
from training.utils.run.seeds import derived_seed


@dataclass
class Turn:
    """What was said, and each model's answer and score; `attempt` counts the answers that /retry asked for."""

    said: str
    attempt: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What a command wants: `say` to be shown, the last turn to be answered again, or the end."""

    say: str = ""
    answer_again: bool = False
    end: bool = False


class Talk:
    """Every model sees the same questions and its own answers. Answers follow from the seed and the turn."""

    def __init__(
        self, models: list[AskedModel], sampling: SamplingArguments, seed: int, scorer: Scorer | None = None
    ) -> None:
        self.models = models
        self.sampling = sampling
        self.seed = seed
        self.scorer = scorer
        self.system = ""
        self.turns: list[Turn] = []

    def ask(self, said: str) -> None:
        """Begin a turn; the models answer it one after the other by `answer`."""
        self.turns.append(Turn(said))

    def messages(self, place: int, with_last_answer: bool = True) -> list[Message]:
        """The conversation as model `place` sees it; its answer to the last turn is left out where asked."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.said})
            if place in turn.answers and (with_last_answer or turn is not self.turns[-1]):
                messages.append({"role": "assistant", "content": turn.answers[place].text.strip()})
        return messages

    def answer(self, place: int) -> Iterator[Answer]:
        """Yield model `place`'s answer to the last turn as it grows. What was yielded last is kept, also where the
        caller goes away."""
        turn = self.turns[-1]
        turn.answers.pop(place, None)
        turn.scores.pop(place, None)
        seed = derived_seed(self.seed, "chat", len(self.turns), turn.attempt)
        for answer in stream_answer(self.models[place], self.messages(place), self.sampling, seed):
            turn.answers[place] = answer
            yield answer

    def score(self, place: int) -> float | None:
        """The reward model's score of model `place`'s last answer; None where there is none to give."""
        turn, asked = self.turns[-1], self.models[place]
        answer = turn.answers.get(place)
        if self.scorer is None or answer is None:
            return None
        messages = self.messages(place, with_last_answer=False)
        if same_tokenizer(asked.tokenizer, self.scorer.tokenizer):
            prompt_ids = prompt_of(asked, messages).flipped_prompt_ids[::-1].tolist()
            response_ids = list(answer.token_ids)
        else:
            prompt_ids, response_ids = self.scorer.ids_of_text(messages, answer.text)
        [turn.scores[place]] = self.scorer.score_ids([prompt_ids], [response_ids])
        return turn.scores[place]

    def drop_turn(self) -> None:
        """Forget a last turn that nobody answered."""
        if self.turns and not self.turns[-1].answers:
            self.turns.pop()

    def command(self, line: str) -> Reply:
        """Obey a line that begins with a slash. ThreestepError where it is no command or cannot be obeyed."""
        name, _, argument = line.strip().removeprefix("/").partition(" ")
        if name not in COMMANDS:
            raise ThreestepError(f"there is no /{name}; /help lists the commands{nearest_names(name, COMMANDS)}")
        return COMMANDS[name].obey(self, argument.strip())

    def set_sampling(self, name: str, argument: str) -> Reply:
        """Set one of the flags of SamplingArguments, checked as on the command line; without a value, tell it."""
        kind = type(getattr(self.sampling, name))
        if argument:
            try:
                changed = replace(self.sampling, **{name: kind(argument)})
            except ValueError:
                raise ThreestepError(f"/{name} expects a number, got '{argument}'") from None
            mistakes = Mistakes()
            changed.validate(mistakes)
            mistakes.raise_if_any()
            self.sampling = changed
        return Reply(f"{name} is {getattr(self.sampling, name)}")

    def saved(self) -> list[dict[str, Any]]:
        """One object a model: its conversation as chat messages, which `--data_path jsonl:FILE` reads."""
        return [
            {
                "messages": self.messages(place),
                "model": asked.name,
                "scores": [turn.scores.get(place) for turn in self.turns],
                "seed": self.seed,
            }
            for place, asked in enumerate(self.models)
        ]


# The commands.


@dataclass(frozen=True)
class Command:
    """help: one line. obey: what it does with the rest of the line."""

    help: str
    obey: Callable[[Talk, str], Reply]


def _system(talk: Talk, argument: str) -> Reply:
    talk.system = argument
    talk.turns.clear()
    return Reply("a new conversation, " + ("with this system prompt" if argument else "without a system prompt"))


def _seed(talk: Talk, argument: str) -> Reply:
    if argument:
        if not argument.isdigit():
            raise ThreestepError(f"/seed expects a number from 0 up, got '{argument}'")
        talk.seed = int(argument)
    return Reply(f"seed is {talk.seed}")


def _reset(talk: Talk, argument: str) -> Reply:
    talk.turns.clear()
    return Reply("a new conversation")


def _retry(talk: Talk, argument: str) -> Reply:
    if not talk.turns:
        raise ThreestepError("/retry: nothing was asked yet")
    turn = talk.turns[-1]
    talk.turns[-1] = Turn(turn.said, turn.attempt + 1)
    return Reply(answer_again=True)


def _save(talk: Talk, argument: str) -> Reply:
    if not argument:
        raise ThreestepError("/save expects a file's name after it")
    path = Path(argument).expanduser()
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in talk.saved())
    except OSError as problem:
        raise ThreestepError(f"/save {path}: {problem.strerror}; name another file") from problem
    return Reply(f"written to {path}, a line for each model")


def _sets(name: str) -> Callable[[Talk, str], Reply]:
    return lambda talk, argument: talk.set_sampling(name, argument)


def _help(talk: Talk, argument: str) -> Reply:
    return Reply("\n".join(f"/{name:<15} {command.help}" for name, command in COMMANDS.items()))


COMMANDS: dict[str, Command] = {
    "system": Command("begin anew with this system prompt; without one, with none", _system),
    "temperature": Command("of what is drawn; 0 takes the likeliest token", _sets("temperature")),
    "top_p": Command("draw from the likeliest tokens of this mass; 1: all", _sets("top_p")),
    "top_k": Command("draw from so many of the likeliest tokens; 0: all", _sets("top_k")),
    "max_new_tokens": Command("most tokens of an answer", _sets("max_new_tokens")),
    "seed": Command("of what is drawn: the same seed, the same answers", _seed),
    "retry": Command("answer the last question again, by other draws", _retry),
    "reset": Command("begin anew", _reset),
    "save": Command("write the conversation to this file, as JSON lines of chat messages", _save),
    "help": Command("these lines", _help),
    "quit": Command("end", lambda talk, argument: Reply(end=True)),
}
