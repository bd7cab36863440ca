"""The characters of a rendered conversation that the assistant writes, turn by turn.

A turn is what a model must write to answer. It begins after the generation prompt and ends with the end-of-turn token.
It includes the marks around a tool call or a thought (`<tool_call>`, `<think>`), which the template writes, but not the
header before it. Knows nothing of token ids.

How turns are found in one rendering of the whole conversation:
1. The conversation is rendered as it is, and again with its texts masked (see `rendering`). Both must agree character
   for character; then the author of each character is known.
2. If the template has `{% generation %}` marks, turns begin there, otherwise after each assistant header that the
   template wrote (see `habits`). If the headers do not match the assistant's messages (a template may have none), a
   turn begins where the messages before it, rendered with the generation prompt, end.
3. A turn ends with the first end-of-turn token that the template wrote after the last character of the message.
4. Every row is checked: a turn holds all rendered characters of its message's texts and none of another message, the
   assistant's text is there, and no message is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from training.utils.data.chat.habits import learn_habits
from training.utils.data.chat.rendering import (
    ChatTemplate,
    MaskedMessages,
    Provenance,
    Rendering,
    TemplateRefused,
    mask_messages,
)
from training.utils.data.sources.formats.messages import BadConversation, Conversation, Message


@dataclass(frozen=True)
class AssistantTurn:
    """Characters [begin, end) of a rendering that the assistant writes.

    message: index of the message they belong to.
    ended: whether they end with an end-of-turn token.
    """

    message: int
    begin: int
    end: int
    ended: bool


@dataclass(frozen=True)
class ReadConversation:
    """A rendered conversation and the assistant's turns in order; `{% generation %}` marks may cut a message into
    several turns."""

    text: str
    turns: tuple[AssistantTurn, ...]


@dataclass(frozen=True)
class _Evidence:
    """A rendering and its masked copy, of the same length; the template wrote the characters that are not masked."""

    plain: str
    masked: str
    masks: MaskedMessages
    origin: Provenance
    marks: list[tuple[int, int]]


class TurnFinder:
    """Finds the assistant's turns in conversations that one template renders."""

    def __init__(self, template: ChatTemplate, special_tokens: Sequence[str], end_token: str | None = None) -> None:
        """See `learn_habits` for the arguments and exceptions."""
        self._template = template
        self._habits = learn_habits(template, special_tokens, end_token)

    @property
    def end_token(self) -> str:
        """The token that ends the last turn of a conversation."""
        return self._habits.ends[0]

    @property
    def ends(self) -> tuple[str, ...]:
        """All tokens that end a turn."""
        return self._habits.ends

    @property
    def template(self) -> ChatTemplate:
        """The template, for what is found by rendering alone."""
        return self._template

    @property
    def template_text(self) -> str:
        """The template's source."""
        return self._template.text

    @property
    def asks_more(self) -> bool:
        """True if the generation prompt may hold more than the header of an assistant's message."""
        return len(self._habits.headers) > 1

    def prompt(self, conversation: Conversation) -> str:
        """The rendering with the generation prompt, which a model is to answer. Raises BadConversation."""
        rendered = self._render(conversation, conversation.messages, generation_prompt=True)
        return rendered.text + self._habits.missing_prompt

    def read(self, conversation: Conversation, generation_prompt: bool = False) -> ReadConversation:
        """Render a conversation and find the assistant's turns in it.

        With `generation_prompt` the text is that of `prompt`. Raises BadConversation, which names the row, if the
        template refuses the conversation or its turns are ambiguous.
        """
        evidence = self._evidence(conversation, generation_prompt)
        places = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if evidence.marks:
            begun = self._of_marks(evidence, places, conversation)
        else:
            begins = self._behind_headers(evidence, len(places), generation_prompt)
            if begins is None:
                begins = [self._behind_prompt(evidence, place, conversation) for place in places]
            begun = [(place, begin, begin) for place, begin in zip(places, begins, strict=True)]
        turns = self._ended(begun, evidence)
        self._check(turns, evidence, conversation)
        return ReadConversation(evidence.plain + (self._habits.missing_prompt if generation_prompt else ""), turns)

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], generation_prompt: bool, marks: bool = False
    ) -> Rendering:
        try:
            return self._template.render(messages, conversation.tools, generation_prompt, marks)
        except TemplateRefused as refused:
            raise BadConversation(
                f"{conversation.where}: the chat template refuses the conversation: {refused}"
            ) from refused

    def _evidence(self, conversation: Conversation, generation_prompt: bool) -> _Evidence:
        plain = self._render(conversation, conversation.messages, generation_prompt).text
        for masks in self._maskings(conversation):
            try:
                masked = self._render(conversation, masks.messages, generation_prompt, self._template.has_marks)
            except BadConversation:
                continue  # a template that inspects a text may refuse the masked one
            origin = masks.provenance(masked.text, plain)
            if origin is not None:
                return _Evidence(plain, masked.text, masks, origin, masked.marks)
        raise BadConversation(
            f"{conversation.where}: the chat template's output depends on the texts so that the author of each part "
            "is unknown; change the template, or leave such rows out (--bad_conversations drop)"
        )

    def _maskings(self, conversation: Conversation) -> Iterator[MaskedMessages]:
        """Mask all texts; then all but the literals that the template looks for; then no tool arguments either, which
        some templates write as Python literals."""
        messages, where = conversation.messages, conversation.where
        yield mask_messages(messages, where)
        yield mask_messages(messages, where, self._template.literals)
        yield mask_messages(messages, where, self._template.literals, arguments=False)

    # Where turns begin.

    def _of_marks(
        self, evidence: _Evidence, places: Sequence[int], conversation: Conversation
    ) -> list[tuple[int, int, int]]:
        """The template's marks as (message, begin, end)."""
        begun: list[tuple[int, int, int]] = []
        for number, (begin, end) in enumerate(evidence.marks):
            low, high = np.searchsorted(evidence.origin.positions_M, [begin, end])
            if low < high:
                place = int(evidence.origin.messages_M[low])
            elif len(evidence.marks) == len(places):
                place = places[number]
            else:  # a mark around a tool call without texts belongs to the turn before it
                place = begun[-1][0] if begun else places[0] if places else 0
            begun.append((place, begin, end))
        if any(place not in places for place, _, _ in begun):
            raise BadConversation(
                f"{conversation.where}: the chat template's {{% generation %}} marks contain a message of another role "
                "than the assistant"
            )
        return begun

    def _behind_headers(self, evidence: _Evidence, turns: int, generation_prompt: bool) -> list[int] | None:
        """Ends of the template's assistant headers; None if there are more or fewer of them than turns."""
        if not self._habits.headers:
            return None
        begins = []
        for match in re.finditer(re.escape(self._habits.headers[-1]), evidence.masked):
            header = next(
                header for header in self._habits.headers if evidence.masked.startswith(header, match.start())
            )
            begins.append(match.start() + len(header))
        if generation_prompt and not self._habits.missing_prompt and begins and begins[-1] == len(evidence.masked):
            begins.pop()
        return begins if len(begins) == turns else None

    def _behind_prompt(self, evidence: _Evidence, place: int, conversation: Conversation) -> int:
        """Beginning of the turn of message `place`: after the messages before it and the generation prompt.

        The two renderings are aligned at the last character of those messages: a template may write earlier ones
        differently.
        """
        earlier = self._render(conversation, evidence.masks.messages[:place], generation_prompt=True).text
        before = evidence.origin.positions_M[evidence.origin.messages_M < place]
        begin = int(before.max()) + 1 if len(before) else 0
        tail = re.split(r"[\U000f0000-\U0010ffff]", earlier)[-1]
        tails = [tail + self._habits.missing_prompt]
        if self._habits.headers and tail.endswith(self._habits.headers[0]):
            tails += [tail.removesuffix(self._habits.headers[0]) + header for header in self._habits.headers[1:]]
        for known in tails:
            if evidence.masked.startswith(known, begin):
                return begin + len(known)
        raise BadConversation(
            f"{conversation.where}, message {place + 1}: cannot tell where the assistant's turn begins: the generation "
            f"prompt after the messages before it ends in {tail[-60:]!r}, the whole conversation continues with "
            f"{evidence.plain[begin : begin + 60]!r}; put {{% generation %}} marks into the template, or leave the row "
            "out (--bad_conversations drop)"
        )

    # Where turns end, and the checks.

    def _ended(self, begun: Sequence[tuple[int, int, int]], evidence: _Evidence) -> tuple[AssistantTurn, ...]:
        """Extend each turn to the end of its end-of-turn token; if a message has several turns, only the last."""
        positions_M, messages_M = evidence.origin.positions_M, evidence.origin.messages_M
        turns = []
        for number, (place, begin, marked_end) in enumerate(begun):
            following = begun[number + 1] if number + 1 < len(begun) else None
            limit = following[1] if following else len(evidence.masked)
            later = np.searchsorted(positions_M, begin)
            foreign = positions_M[later:][messages_M[later:] != place]
            limit = min(limit, int(foreign[0])) if len(foreign) else limit
            masked = positions_M[later:][(messages_M[later:] == place) & (positions_M[later:] < limit)]
            last = int(masked[-1]) + 1 if len(masked) else begin
            if following and following[0] == place:
                turns.append(AssistantTurn(place, begin, marked_end, ended=True))
                continue
            end = self._end_of_turn(evidence.masked, last, limit)
            turns.append(AssistantTurn(place, begin, end or max(last, marked_end), ended=end is not None))
        return tuple(turns)

    def _end_of_turn(self, masked: str, begin: int, limit: int) -> int | None:
        ends = [at + len(token) for token in self._habits.ends if (at := masked.find(token, begin, limit)) >= 0]
        if ends:
            return min(ends)
        other = self._habits.ending(masked, begin, limit)  # some templates end a tool call with another token
        return other.end() if other else None

    def _check(self, turns: Sequence[AssistantTurn], evidence: _Evidence, conversation: Conversation) -> None:
        """Raise BadConversation unless each text is in its turn. In shapes: C characters, M of them masked."""
        origin, where = evidence.origin, conversation.where
        owner_C = np.full(len(evidence.plain), -1)  # the message whose turn a character is in
        for turn in turns:
            owner_C[turn.begin : turn.end] = turn.message
        owner_M = owner_C[origin.positions_M]
        inside_M = owner_M >= 0
        wrong_M = inside_M & (owner_M != origin.messages_M)
        if wrong_M.any():
            place = int(origin.messages_M[wrong_M][0])
            raise BadConversation(
                f"{where}: a turn of the assistant would hold text of message {place + 1} "
                f"({conversation.messages[place]['role']}): the chat template mixes the two"
            )
        written = set(origin.texts_M.tolist())
        outside = set(origin.texts_M[~inside_M].tolist())
        turn_texts: dict[int, str] = {}
        for turn in turns:
            turn_texts[turn.message] = turn_texts.get(turn.message, "") + evidence.plain[turn.begin : turn.end]
        for place in () if evidence.marks else turn_texts:
            for name in _called(conversation.messages[place]):
                if name not in turn_texts[place]:
                    raise BadConversation(
                        f"{where}, message {place + 1} (assistant): the chat template omits its call of '{name}'"
                    )
        for number, text in enumerate(evidence.masks.texts):
            message = conversation.messages[text.message]
            named = f"{where}, message {text.message + 1} ({message['role']})"
            cut = any(literal in text.text for literal in self._template.literals)
            if text.masked and number not in written and not (cut or _may_vanish(message, text.kind)):
                raise BadConversation(f"{named}: the chat template omits its text: {text.text[:60]!r}")
            if message["role"] != "assistant" or number not in written:
                continue
            # Marks may omit thoughts, or whole turns; content that they mark must be marked whole.
            left_out = evidence.marks and (text.kind != "content" or text.message not in turn_texts)
            if number in outside and not left_out:
                raise BadConversation(f"{named}: part of the assistant's text lies outside its turn")
            if text.kind != "content" or text.message not in turn_texts:
                continue
            if not cut and text.text.strip() not in turn_texts[text.message]:
                raise BadConversation(
                    f"{named}: the chat template changes the assistant's text: it becomes "
                    f"{turn_texts[text.message][:60]!r} and was {text.text[:60]!r}"
                )


def _may_vanish(message: Message, kind: str) -> bool:
    """True for texts that templates may omit: earlier thoughts, and the text next to a tool call."""
    return kind == "reasoning" or (kind == "content" and bool(message.get("tool_calls")))


def _called(message: Message) -> list[str]:
    """The names of the tools that a message calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    return [str(function["name"]) for function in functions if "name" in function]
