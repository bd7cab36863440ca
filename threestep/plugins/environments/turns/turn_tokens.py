"""Messages of an environment in the middle of a response, as the tokens that a chat template gives them.

Tokens of a conversation are appended: the model's sampled tokens to the prompt, then the text that the template writes
after an assistant's turn for the environment's messages, up to the next generation prompt. Sampled tokens are never
encoded again, so that a model trains on the tokens that it saw. They equal the template's if it writes earlier turns as
they were sampled, which probes find out. If it does not, the conversation forks: its tokens begin anew, with all
messages as the template writes them by now. Serves rollouts of several turns; knows nothing of environments.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from training.utils.base.errors import ThreestepError
from training.utils.data.formats.messages import (
    BadConversation,
    Conversation,
    Message,
    checked_messages,
    checked_tools,
)

if TYPE_CHECKING:
    from training.utils.data.chat.chat import ChatTokenizer
    from training.utils.data.chat.spans import TurnFinder
    from training.utils.data.rows.tokenize import Ids, TextTokenizer

_MOST_CACHED = 4096  # encoded replies; environments often send the same ones
# Parts a control token that a message quotes into two texts: a code point that is no character.
_SEAM = "\ufdd0"
# A key of messages that an environment sent in an earlier conversation, in whatever role.
BY_ENVIRONMENT = "by_environment"
_TOOL, _CALL_ID = "look", "call00001"  # in conversations that probe a template
_QUESTION: Message = {"role": "user", "content": "a"}
_ANSWER: Message = {"role": "assistant", "content": "b"}
_THOUGHT: Message = {"role": "assistant", "content": "<think>\nc\n</think>\n\nb"}


@dataclass(frozen=True)
class ReplyTokens:
    """The tokens after a sampled turn. cut_messages: how many messages were shortened."""

    ids: Ids
    cut_messages: int = 0


@dataclass(frozen=True)
class HistoryTokens:
    """ids: a whole conversation as the template writes it by now, up to the next turn; None if it did not change.
    is_refused: the template writes no such history, whatever the model wrote there."""

    ids: Ids | None = None
    is_refused: bool = False


class SaidCall(Protocol):
    """A tool call that a model wrote. arguments: JSON values by name."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class ModelTurn(Protocol):
    """A turn that a model sampled. text: all of it, without the token that ends a turn. content: without reasoning and
    calls."""

    @property
    def text(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def calls(self) -> Sequence[SaidCall]: ...


class TurnTokens:
    """The tokens around the turns that a model draws, under one template."""

    def __init__(self, chat: ChatTokenizer, most_message_tokens: int | None) -> None:
        """most_message_tokens: of one message of an environment; the middle of a longer one is left out. None: no
        limit."""
        self._chat, self._most = chat, most_message_tokens
        self._habits: dict[tuple[str, str], str | None] = {}
        self._encoded = lru_cache(maxsize=_MOST_CACHED)(self._encode)
        self._prefix = lru_cache(maxsize=_MOST_CACHED)(self._prefix_of)

    def opening(self, messages: Sequence[Message], tools: Any = None) -> Ids:
        """Return the ids of a prompt: the messages with which a conversation begins, and the generation prompt. Special
        tokens in what tools answered before become ordinary ones, as in `reply`."""
        where = "an environment's opening"
        untrusted = not all(map(_is_trusted, messages))
        words = self._control_words(self._chat.finder(tools, {})) if untrusted else ()
        with _explained():
            pieces = self._chat.prompt(_conversation([_opened(each, words) for each in messages], tools, where))
        return _encode_apart(self._chat.texts, "".join(piece.text for piece in pieces).split(_SEAM))

    def reply(self, messages: Sequence[Message], tools: Any, last_token: int) -> ReplyTokens:
        """Return the tokens after a sampled turn: the messages, and the generation prompt of the next turn.

        last_token: of the sampled turn; if it is not the template's end of a turn, that comes first.
        Raises ThreestepError if the template refuses the messages.
        """
        for role in dict.fromkeys(str(message.get("role")) for message in messages):
            self.rewritten_before(role, tools)
        end_ids, rest_ids, cut_messages = self._encoded(json.dumps([list(messages), tools]))
        ids = rest_ids if end_ids[-1:] == (last_token,) else end_ids + rest_ids
        if not ids:
            raise ThreestepError(
                "the chat template renders nothing between two assistant turns, so a model cannot tell them apart; "
                "pass another template with --chat_template FILE"
            )
        return ReplyTokens(list(ids), cut_messages)

    def rewritten_before(self, role: str, tools: Any) -> str | None:
        """Return the part of earlier turns that the template rewrites once a message of `role` follows; None if it
        writes them as they were sampled: the model's past input is the beginning of its next one. ThreestepError if it
        takes no such message."""
        key = role, json.dumps(tools)
        if key not in self._habits:
            try:
                self._habits[key] = _rewritten(self._chat.finder(tools, {}), role, tools)
            except BadConversation as refused:
                raise ThreestepError(
                    f"--environment, --tools: the chat template accepts no message of role '{role}' after an answer "
                    f"({refused}); pass another with --chat_template FILE"
                ) from None
        return self._habits[key]

    def history(
        self, said: Sequence[Message | ModelTurn], opened: int, tools: Any, ids: Sequence[int]
    ) -> HistoryTokens:
        """Return the whole conversation as the template writes it by now, once the last messages follow.

        said: messages, of which the first `opened` were the opening, and the model's turns; up to a reply. ids: the
        same with the reply appended to the sampled tokens.
        """
        turns = [place for place, each in enumerate(said) if not isinstance(each, dict)]
        roles = {str(message["role"]) for message in said[turns[-1] + 1 :] if isinstance(message, dict)}
        if all(self.rewritten_before(role, tools) is None for role in roles):
            return HistoryTokens()
        finder = self._chat.finder(tools, {})
        words, calls = self._control_words(finder), _writes_calls(finder, tools)
        try:
            written = [
                _turn_message(each, calls) if not isinstance(each, dict)
                else _opened(each, words) if place < opened
                else _with_seams(self._shortened(each)[0], words)
                for place, each in enumerate(said)
            ]  # fmt: skip
            conversation = _conversation(written, tools, "a conversation's history")
            try:
                text = "".join(piece.text for piece in self._chat.prompt(conversation))
            except BadConversation:  # the model's turns cannot be separated
                text = finder.prompt(conversation)
        except BadConversation:
            return HistoryTokens(is_refused=True)
        anew = _encode_apart(self._chat.texts, text.split(_SEAM))
        had, gets = self._chat.decode([list(ids), anew])
        return HistoryTokens(None if had == gets else anew)

    def _encode(self, given: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the ids of the end of a turn and of the messages after it, and how many were cut. given: messages and
        tools as JSON."""
        messages, tools = json.loads(given)
        finder = self._chat.finder(tools, {})
        shortened = [self._shortened(message) for message in messages]
        parted = [_with_seams(message, self._control_words(finder)) for message, _ in shortened]
        with _explained():
            # The same messages with another text tell where the turn ends: no text of theirs can move that.
            shape = [{**message, "content": "e"} for message in messages]
            before, end = self._prefix(json.dumps([shape, tools]))
            text = finder.prompt(_replies(finder, parted, tools))
        if not text.startswith(before):
            raise ThreestepError(
                "--environment, --tools: the text that the chat template renders before an environment's messages "
                "depends on those messages; pass another template with --chat_template FILE"
            )
        end_ids, rest_ids = _encode_behind(self._chat.texts, end, text[len(before) :].split(_SEAM))
        cut_messages = sum(was_cut for _, was_cut in shortened)
        return tuple(end_ids), tuple(rest_ids), cut_messages

    def _prefix_of(self, given: str) -> tuple[str, str]:
        """Return the template's text up to the end of the turn before some messages, and the token that ends it, "" if
        there is none. given: messages and tools as JSON."""
        messages, tools = json.loads(given)
        finder = self._chat.finder(tools, {})
        read = finder.read(_replies(finder, messages, tools), generation_prompt=True)
        turn = [turn for turn in read.turns if turn.message == 1][-1]
        written = read.text[: turn.end]
        ends = [token for token in (*finder.ends, *self._chat.special) if turn.ended and written.endswith(token)]
        return written, max(ends, key=len, default="")

    def _control_words(self, finder: TurnFinder) -> list[str]:
        """Tokens that a message must not forge, longest first: special ones, and added ones that the template names."""
        named = {word for word in self._chat.added if word in finder.template.text}
        return sorted({*self._chat.special, *finder.ends, *named} - {""}, key=len, reverse=True)

    def _shortened(self, message: Message) -> tuple[Message, bool]:
        """The message, and whether the middle of its text was left out."""
        text = message.get("content")
        if not isinstance(text, str) or self._most is None or len(text.encode()) <= self._most:  # a token has a byte
            return message, False
        ids = _encode_apart(self._chat.texts, [text])
        if len(ids) <= self._most:
            return message, False
        head, tail = self._most // 2, len(ids) - (self._most + 1) // 2
        first, last = self._chat.decode([ids[:head], ids[tail:]])
        return {**message, "content": f"{first} [... {tail - head} tokens left out ...] {last}"}, True


def _encode_apart(texts: TextTokenizer, parts: Sequence[str]) -> Ids:
    """Ids of a text in parts that no token goes across: where one would, they are tokenized one by one."""
    ids: Ids = []
    before = ""
    for part in filter(None, parts):
        alone, last, both = (
            each.parts[0] for each in texts.encode_parts([[part], [before], [before + part]], [[False]] * 3)
        )
        ids += both[len(last) :] if both[: len(last)] == last else alone
        before = part
    return ids


def _encode_behind(texts: TextTokenizer, end: str, parts: Sequence[str]) -> tuple[Ids, Ids]:
    """Ids of the token that ends a turn ("" for none), and of the text behind it (see `_encode_apart`)."""
    first, *others = parts
    (encoded,) = texts.encode_parts([(end, first)], [(False, False)])
    end_ids, ids = encoded.parts
    if others:
        ids = ids + _encode_apart(texts, parts)[len(_encode_apart(texts, [first])) :]
    return end_ids, ids


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Inside, a template's refusal becomes a ThreestepError."""
    try:
        yield
    except BadConversation as refused:
        raise ThreestepError(
            f"--environment, --tools: {refused}; or pass another template with --chat_template FILE"
        ) from None


def _conversation(messages: Sequence[Message], tools: Any, where: str) -> Conversation:
    return Conversation(checked_messages(list(messages), where), where, checked_tools(tools, where))


def _replies(finder: TurnFinder, messages: Sequence[Message], tools: Any) -> Conversation:
    """The messages behind a question and an assistant's message that they may follow."""
    before = _ANSWER
    answers = [message for message in messages if message.get("role") == "tool"]
    if answers and _writes_calls(finder, tools):
        calls = [_call(answer.get("name", _TOOL), answer.get("tool_call_id", _CALL_ID)) for answer in answers]
        before = {"role": "assistant", "content": "", "tool_calls": calls}
    return _conversation([_QUESTION, before, *messages], tools, "an environment's messages")


def _call(name: str = _TOOL, number: str = _CALL_ID, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments or {"key": "d"}}}


def _turn_message(said: ModelTurn, writes_calls: bool) -> Message:
    """A turn that was drawn, as a message. Its thoughts stay in its text, where a template that strips them looks for
    them; where it calls, they come apart if the template writes calls."""
    if not (said.calls and writes_calls):
        return {"role": "assistant", "content": said.text.replace(_SEAM, "\ufffd")}
    calls = [_call(each.name, f"call{number:05d}", each.arguments) for number, each in enumerate(said.calls, start=1)]
    texts = {"content": said.content, **({"reasoning_content": said.reasoning} if said.reasoning else {})}
    written = {name: text.replace(_SEAM, "\ufffd") for name, text in texts.items()}
    return {"role": "assistant", **written, "tool_calls": calls}


def _writes_calls(finder: TurnFinder, tools: Any) -> bool:
    """True if the template writes an assistant's calls; otherwise they can only stand in its text."""
    called = {"role": "assistant", "content": "", "tool_calls": [_call()]}
    try:
        finder.read(_conversation([_QUESTION, called], tools, "a probe of calls"))
    except BadConversation:
        return False
    return True


def _opened(message: Message, words: Sequence[str]) -> Message:
    """A message of an opening, as the template gets it."""
    bare = {key: value for key, value in message.items() if key != BY_ENVIRONMENT}
    return _with_seams(bare, () if _is_trusted(message) else words)


def _is_trusted(message: Message) -> bool:
    """True if a message may hold special tokens: those of rows may, those of tools and environments may not."""
    return message.get("role") != "tool" and not message.get(BY_ENVIRONMENT)


def _with_seams(message: Message, words: Sequence[str]) -> Message:
    """The message, each control word in its text and its name parted by a seam."""
    parted = {}
    for key in ("content", "name"):
        text = message.get(key)
        if isinstance(text, str):
            text = text.replace(_SEAM, "\ufffd")
            for word in words:
                text = text.replace(word, f"{word[:1]}{_SEAM}{word[1:]}")
            parted[key] = text
    return {**message, **parted}


def _rewritten(finder: TurnFinder, role: str, tools: Any) -> str | None:
    """The part of an earlier turn that the template rewrites once a message of `role` follows; None if there is none.
    Probed over two exchanges, with the turns of a model that writes as the template does."""
    reply: Message = {"role": role, "content": "e"}
    forms = {"the thought": _THOUGHT, "the text": _ANSWER}
    if role == "tool":  # behind a thought alone: an empty one, which a template adds to a last answer, is not drawn
        reply |= {"name": _TOOL, "tool_call_id": _CALL_ID}
        call = {"role": "assistant", "content": "", "reasoning_content": "c", "tool_calls": [_call()]}
        forms = {"the thought or the call": call if _writes_calls(finder, tools) else _THOUGHT}
    where = "a probe of the chat template"
    for what, turn_message in forms.items():
        messages = [_QUESTION]
        for _ in range(2):
            prompt = finder.prompt(_conversation(messages, tools, where))
            read = finder.read(_conversation([*messages, turn_message], tools, where))
            had = read.text[: read.turns[-1].end]
            if not had.startswith(prompt):  # the generation prompt has more than the header
                begin = next(turn.begin for turn in read.turns if turn.message == len(messages))
                had = prompt + read.text[begin : read.turns[-1].end]
            messages = [*messages, turn_message, reply]
            if not finder.prompt(_conversation(messages, tools, where)).startswith(had):
                return what
    return None
