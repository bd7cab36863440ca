"""A conversation with one or two models, and its commands. Independent of terminal and web page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.acting import stream_trajectory
from threestep.plugins.evaluation.model import Answer, ChatModel, prompt_of, stream_answer
from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.seeds import derived_seed
from training.utils.base.storage import json_object
from training.utils.flags.flags import note_mistakes
from training.utils.loading.tokenizers import same_tokenizer
from training.utils.setup.media import media_kind

if TYPE_CHECKING:
    from threestep.plugins.evaluation.scorer import Scorer
    from training.utils.contracts.media import MediaFile
    from training.utils.data.formats.messages import Message
    from training.utils.generation.arguments import SamplingArguments
    from training.utils.generation.partners import Partners


SCORES_COMPARE = "Scores come from the reward model; compare only those of answers to the same prompt."


@dataclass
class Turn:
    """A question with its pictures, and each model's answer and score by its index; `attempt` counts /retry."""

    question: str
    attempt: int = 0
    pictures: tuple[MediaFile, ...] = ()
    answers: dict[int, Answer] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The reaction to a line: `text` to show, answers to the last turn, or the end."""

    text: str = ""
    answer: bool = False
    end: bool = False


@dataclass(eq=False)
class Talk:
    """A conversation. Every model sees the same questions and its own answers, which depend on the seed and the turn.

    acting: answers the models; None: nobody does. columns: of the row with which a question opens an environment.
    waiting: pictures that go with the next question.
    """

    models: list[ChatModel]
    sampling: SamplingArguments
    seed: int
    scorer: Scorer | None = None
    system: str = ""
    acting: Partners | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    waiting: list[MediaFile] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Begin a turn, which each model answers by `answer`."""
        self.turns.append(Turn(question, pictures=tuple(self.waiting)))
        self.waiting.clear()

    def attach(self, path: str) -> str:
        """Read a picture, which goes with the next question; return its description. ThreestepError if it cannot be
        read, or if one of the models or the reward model reads text alone."""
        for chat_model in self.models:
            if chat_model.reads is None:
                raise ThreestepError(
                    f"'{chat_model.name}' does not support images here: it is a text-only model, its folder has no "
                    "image processor, its prompts use no chat template, or the rollout engine supports only text"
                )
        if self.acting is not None:
            raise ThreestepError(
                f"conversations with {self.acting.flag.replace(',', ' or')} are text-only; to chat about images, "
                "remove these flags"
            )
        if self.scorer is not None and self.scorer.unread is not None:
            raise ThreestepError(f"{self.scorer.unread}; to chat about images, remove --reward_model")
        picture = media_kind().opened_file(path)
        self.waiting.append(picture)
        return f"{picture.words}; it will be sent with your next message"

    def enter(self, line: str) -> Reply:
        """Run a command, or begin a turn."""
        if line.startswith("/"):
            return self.command(line)
        self.ask(line)
        return Reply(answer=True)

    def messages(self, place: int, with_last_answer: bool = True) -> list[Message]:
        """The conversation as model `place` sees it, with or without its answer to the last turn."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": _content(turn)})
            if place in turn.answers and (with_last_answer or turn is not self.turns[-1]):
                messages += self.models[place].messages_of(turn.answers[place])
        return messages

    def answer(self, place: int) -> Iterator[Answer]:
        """Yield model `place`'s answer to the last turn as it grows. The last one is stored, even if the caller stops
        early."""
        turn = self.turns[-1]
        turn.answers.pop(place, None)
        turn.scores.pop(place, None)
        seed = derived_seed(self.seed, "chat", len(self.turns), turn.attempt)
        for answer in self._stream(place, seed):
            turn.answers[place] = answer
            yield answer

    def _stream(self, place: int, seed: int) -> Iterator[Answer]:
        chat_model, messages = self.models[place], self.messages(place)
        if self.acting is None:
            return stream_answer(chat_model, messages, self.sampling, seed)
        own = {"messages": messages, "prompt": self.turns[-1].question}
        return stream_trajectory(
            chat_model, self.acting, {"ground_truth": None, **self.columns, **own}, self.sampling, seed=seed
        )

    def note(self, place: int) -> str:
        """`Answer.note` of model `place`'s last answer."""
        answer = self.turns[-1].answers.get(place)
        return "" if answer is None else answer.note

    def score(self, place: int) -> float | None:
        """The reward model's score of model `place`'s last answer; None without a reward model or an answer."""
        turn, chat_model = self.turns[-1], self.models[place]
        answer = turn.answers.get(place)
        if self.scorer is None or answer is None:
            return None
        messages = self.messages(place, with_last_answer=False)
        if same_tokenizer(chat_model.tokenizer, self.scorer.tokenizer):
            prompt = prompt_of(chat_model, messages)
            prompt_ids, response_ids = prompt.flipped_prompt_ids[::-1].tolist(), list(answer.token_ids)
            pictured = (prompt.media,), chat_model.media if prompt.media else None
        else:
            prompt_ids, response_ids = self.scorer.ids_of_text(messages, chat_model.message_text(answer))
            pictured = ((),), None
        [turn.scores[place]] = self.scorer.score_ids([prompt_ids], [response_ids], *pictured)
        return turn.scores[place]

    def begin(self) -> None:
        """Begin a new conversation."""
        self.turns.clear()
        self.waiting.clear()

    def drop_turn(self) -> None:
        """Remove the last turn if no model answered it; its pictures go with the next one."""
        if self.turns and not self.turns[-1].answers:
            self.waiting[:0] = self.turns.pop().pictures

    def command(self, line: str) -> Reply:
        """Run a line that begins with a slash. ThreestepError if it is not a command or fails."""
        name, _, argument = line.strip().removeprefix("/").partition(" ")
        if name not in COMMANDS:
            near = nearest_names(f"/{name}", [f"/{command}" for command in COMMANDS])
            raise ThreestepError(f"unknown command /{name}; /help lists the commands{near}")
        return COMMANDS[name][1](self, argument.strip())

    def set_sampling(self, name: str, argument: str) -> Reply:
        """Set a flag of SamplingArguments, checked as on the command line; without a value, show it."""
        kind = type(getattr(self.sampling, name))
        if argument:
            try:
                changed = replace(self.sampling, **{name: kind(argument)})
            except ValueError:
                raise ThreestepError(f"/{name} expects a number, got '{argument}'") from None
            mistakes = Mistakes()
            note_mistakes(changed, mistakes)
            mistakes.raise_if_any()
            self.sampling = changed
        return Reply(f"{name} is {getattr(self.sampling, name)}")


def _content(turn: Turn) -> Any:
    """The user's message: the pictures first, in a chat template's parts."""
    if not turn.pictures:
        return turn.question
    images = [{"type": "image", "image": picture.data} for picture in turn.pictures]
    return [*images, {"type": "text", "text": turn.question}]


# The commands.


def _image(talk: Talk, argument: str) -> Reply:
    if not argument:
        raise ThreestepError("/image expects an image file, got none; type /image FILE")
    return Reply(talk.attach(argument))


def _system(talk: Talk, argument: str) -> Reply:
    talk.system = argument
    talk.begin()
    return Reply(f"new conversation {'with this' if argument else 'without a'} system prompt")


def _seed(talk: Talk, argument: str) -> Reply:
    if argument:
        if not argument.isdecimal() or len(argument) > 18:
            raise ThreestepError(f"/seed expects a whole number of 0 or more, got '{argument}'")
        talk.seed = int(argument)
    return Reply(f"seed is {talk.seed}")


def _row(talk: Talk, argument: str) -> Reply:
    if talk.acting is None:
        raise ThreestepError("/row works only in a chat with --environment")
    if argument:
        talk.columns = json_object(argument, "/row")
    return Reply(f"the next question has the columns {json.dumps(talk.columns, ensure_ascii=False)}")


def _reset(talk: Talk, argument: str) -> Reply:
    talk.begin()
    return Reply("new conversation")


def _retry(talk: Talk, argument: str) -> Reply:
    if not talk.turns:
        raise ThreestepError("/retry expects an earlier question, got none; ask one first")
    turn = talk.turns[-1]
    talk.turns[-1] = Turn(turn.question, turn.attempt + 1, turn.pictures)
    return Reply(answer=True)


def _save(talk: Talk, argument: str) -> Reply:
    """One line per model: its conversation as chat messages, which `--data_path jsonl:FILE` reads, with its pictures in
    a folder beside it."""
    if not argument:
        raise ThreestepError("/save expects a file name, got none; type /save FILE")
    path = Path(argument).expanduser()
    try:
        with open(path, "x", encoding="utf-8") as file:
            images = _saved_pictures(talk, path)
            for place, chat_model in enumerate(talk.models):
                scores = [turn.scores.get(place) for turn in talk.turns]
                saved = {"messages": list(map(_without_bytes, talk.messages(place))), **images}
                saved |= {"model": chat_model.name, "scores": scores, "seed": talk.seed}
                file.write(json.dumps(saved, ensure_ascii=False) + "\n")
    except OSError as problem:
        raise ThreestepError(f"/save {path}: {problem.strerror}; name another file") from problem
    return Reply(f"written to {path}, one line per model")


def _saved_pictures(talk: Talk, path: Path) -> dict[str, list[str]]:
    """Write the pictures of a conversation beside the file `path`; return the column that names them, if there are
    some."""
    pictures = [picture for turn in talk.turns for picture in turn.pictures]
    if not pictures:
        return {}
    folder = path.with_name(f"{path.name}.images")
    folder.mkdir()
    names = [f"{place}{picture.path.suffix}" for place, picture in enumerate(pictures, start=1)]
    for name, picture in zip(names, pictures, strict=True):
        (folder / name).write_bytes(picture.data)
    return {"images": [f"{folder.name}/{name}" for name in names]}


def _without_bytes(message: Message) -> Message:
    """The message with parts that mark the places of its pictures."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if "image" in part else part for part in content]}


def _sets(name: str) -> Callable[[Talk, str], Reply]:
    return lambda talk, argument: talk.set_sampling(name, argument)


def _help(talk: Talk, argument: str) -> Reply:
    return Reply("\n".join(f"/{name:<15} {text}" for name, (text, _) in COMMANDS.items()))


# By name: a line of help, and what is called with the rest of the line.
COMMANDS: dict[str, tuple[str, Callable[[Talk, str], Reply]]] = {
    "system": ("start a new conversation with this system prompt, or without one", _system),
    "temperature": ("sampling temperature; 0 picks the most likely token", _sets("temperature")),
    "top_p": ("draw from the most likely tokens up to this total probability; 1: all", _sets("top_p")),
    "top_k": ("draw from the k most likely tokens; 0: all", _sets("top_k")),
    "max_new_tokens": ("maximum tokens per answer", _sets("max_new_tokens")),
    "seed": ("the same seed gives the same answers", _seed),
    "row": ("row columns for opening --environment, as a JSON object", _row),
    "retry": ("answer the last question again with new random draws", _retry),
    "reset": ("start a new conversation", _reset),
    "image": ("send this image with the next message; repeat for several", _image),
    "save": ("write the conversation to this file as chat messages in JSON Lines", _save),
    "help": ("show this list", _help),
    "quit": ("end the chat", lambda talk, argument: Reply(end=True)),
}
