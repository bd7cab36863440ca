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
3. An answer ends with the first end-of-turn token that the template wrote after its last character. A turn that ends
   otherwise, as with a call of numbers alone, ends where the conversation up to it does, rendered by itself, and with
   the special token there. Where that is none, the next speaker's token ends the turn, as at inference, and one is
   added behind the last turn of a conversation (GLM 4.5).
4. Every row is checked: a turn holds all rendered characters of its message's texts and none of another message, the
   assistant's text and its calls are there, and no message is missing.
5. A template may want a call in another form (`forms_of_calls`): the first one that it writes completely is taken.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

import numpy as np

from training.utils.data.chat.habits import learn_habits
from training.utils.data.chat.rendering import (
    PROBE_CALL,
    ChatTemplate,
    MaskedMessages,
    Provenance,
    Rendering,
    TemplateRefused,
    mask_messages,
)
from training.utils.data.formats.messages import (
    REASONING_KEYS,
    BadConversation,
    Conversation,
    Message,
    forms_of_calls,
)

_WRITTEN_NULL = re.compile(r"\s*(None|null|undefined)\b")
_MASKED = re.compile(r"[\U000f0000-\U0010ffff]")
# A call and its answer, by which the token is learnt that ends a call where the template leaves it open.
_CALLED: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
    {"role": "tool", "name": PROBE_CALL["function"]["name"], "tool_call_id": PROBE_CALL["id"], "content": "e"},
)


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
    several turns. messages: in the form that was rendered. left_out: texts of the assistant's beside its calls that the
    template does not write."""

    text: str
    turns: tuple[AssistantTurn, ...]
    messages: list[Message]
    left_out: int = 0


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

    def __init__(
        self,
        template: ChatTemplate,
        special_tokens: Sequence[str],
        end_token: str | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        """See `learn_habits` for the arguments and exceptions."""
        self._template = template
        self._habits = learn_habits(template, special_tokens, end_token, added_tokens)
        self._added_to_calls: str | None = None
        self._closers: dict[str, bool] = {}  # tokens, and whether each closes every call of a turn

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
        if not any(message.get("tool_calls") for message in conversation.messages):
            return self._read(conversation, generation_prompt)[0]
        refusals, second_best = [], None
        for messages in forms_of_calls(conversation.messages):
            try:
                read, is_json = self._read(replace(conversation, messages=messages), generation_prompt)
            except BadConversation as refused:
                refusals.append(refused)
                continue
            if is_json:
                return read
            second_best = second_best or read
        if second_best is None:  # the template's own refusal may be that of a form alone
            raise next((each for each in refusals if not isinstance(each.__cause__, TemplateRefused)), refusals[0])
        return second_best

    def _read(self, conversation: Conversation, generation_prompt: bool) -> tuple[ReadConversation, bool]:
        """The conversation in the form of its messages, and whether no call's arguments are written as Python would
        print them."""
        evidence = self._evidence(conversation, generation_prompt)
        places = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if evidence.marks:
            begun = self._of_marks(evidence, places, conversation)
        else:
            begins = self._begins(evidence, places, conversation, generation_prompt)
            begun = [(place, begin, begin) for place, begin in zip(places, begins, strict=True)]
        turns, text = self._ended(begun, evidence, conversation), evidence.plain
        left_out, is_json = _check(turns, evidence, conversation, self._template.literals)
        if generation_prompt:
            text += self._habits.missing_prompt
        elif turns and not turns[-1].ended and turns[-1].message == len(conversation.messages) - 1:
            turns, text = self._closed(turns, text, conversation)
        return ReadConversation(text, turns, conversation.messages, left_out), is_json

    def _closed(
        self, turns: tuple[AssistantTurn, ...], text: str, conversation: Conversation
    ) -> tuple[tuple[AssistantTurn, ...], str]:
        """The turns and the text with the token that ends the last turn, where the template leaves it open."""
        end = self._habits.ends[0] if self._habits.is_open else ""
        if conversation.messages[-1].get("tool_calls"):
            end = self._call_end()
        if not end:
            return turns, text
        text += end
        return (*turns[:-1], replace(turns[-1], end=len(text), ended=True)), text

    def _call_end(self) -> str:
        """The token that ends a call where the template leaves it open: with which it begins a tool's answer. "" where
        it leaves no answer open and ends a call by something else."""
        if self._added_to_calls is None:
            self._added_to_calls = self._habits.ends[0] if self._habits.is_open else ""
            try:
                read = self.read(Conversation(list(_CALLED), "a probe of calls"), generation_prompt=True)
            except BadConversation:
                return self._added_to_calls
            turn = read.turns[0]
            match = next((m for m in self._specials(read.text, turn.begin) if m.end() == turn.end), None)
            if turn.ended and match and match.group() not in self._habits.asking:
                self._added_to_calls = match.group()
        return self._added_to_calls

    def _specials(self, text: str, begin: int, limit: int | None = None) -> Iterator[re.Match[str]]:
        special = self._habits.special
        return special.finditer(text, begin, len(text) if limit is None else limit) if special else iter(())

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

    def _begins(
        self, evidence: _Evidence, places: Sequence[int], conversation: Conversation, generation_prompt: bool
    ) -> list[int]:
        """Beginnings of the turns of `places`: behind what asks for each."""
        begins = self._behind_headers(evidence, places, generation_prompt)
        return begins or [self._behind_prompt(evidence, place, conversation) for place in places]

    def _of_marks(
        self, evidence: _Evidence, places: Sequence[int], conversation: Conversation
    ) -> list[tuple[int, int, int]]:
        """The template's marks as (message, begin, end)."""
        begun: list[tuple[int, int, int]] = []
        marks = [mark for mark in evidence.marks if mark[0] < mark[1]]
        begins = self._known_begins(evidence, places, conversation)
        for number, (begin, end) in enumerate(marks):
            low, high = np.searchsorted(evidence.origin.positions_M, [begin, end])
            if low < high:
                place = int(evidence.origin.messages_M[low])
            elif any(known <= end for known in begins.values()):
                place = max(place for place, known in begins.items() if known <= end)
            elif len(marks) == len(places):
                place = places[number]
            else:  # a mark around a tool call without texts belongs to the turn before it
                place = begun[-1][0] if begun else places[0] if places else 0
            begun.append((place, begin, end))
        if any(place not in places for place, _, _ in begun):
            raise BadConversation(
                f"{conversation.where}: the chat template's {{% generation %}} marks contain a message of another role "
                "than the assistant"
            )
        if not begins:
            heads = self._habits.headers
            return [
                (place, begin + next((len(head) for head in heads if evidence.masked.startswith(head, begin)), 0), end)
                for place, begin, end in begun
            ]
        # Marks may begin before the prompt ends, and mark what follows a turn that has ended (Phi-3's <|endoftext|>).
        clipped: list[tuple[int, int, int]] = []
        for place, begin, end in begun:
            before = clipped[-1] if clipped and clipped[-1][0] == place else None
            ended = before and evidence.masked[: before[2]].rstrip().endswith(self._habits.ends)
            if ended and not _MASKED.search(evidence.masked, begin, end):
                continue
            clipped.append((place, min(end, begin if before else max(begin, begins.get(place, begin))), end))
        return sorted([*clipped, *_unmarked_answers(clipped, begins, conversation)], key=lambda mark: mark[1])

    def _known_begins(self, evidence: _Evidence, places: Sequence[int], conversation: Conversation) -> dict[int, int]:
        """Beginnings of messages' turns that are found without the marks."""
        begins = self._behind_headers(evidence, places, False)
        if begins:
            return dict(zip(places, begins, strict=True))
        known = {}
        for place in places:
            with contextlib.suppress(BadConversation):
                known[place] = self._behind_prompt(evidence, place, conversation)
        return known

    def _behind_headers(self, evidence: _Evidence, places: Sequence[int], generation_prompt: bool) -> list[int] | None:
        """Ends of the template's assistant headers; None if they do not fit the turns of `places`."""
        if not self._habits.headers:
            return None
        begins = []
        for match in re.finditer(re.escape(self._habits.headers[-1]), evidence.masked):
            header = next(
                header for header in self._habits.headers if evidence.masked.startswith(header, match.start())
            )
            begins.append(match.start() + len(header))
        asks = self._habits.always_asks or (generation_prompt and not self._habits.missing_prompt)
        if asks and begins and begins[-1] == len(evidence.masked):
            begins.pop()
        if len(begins) != len(places):
            return None
        # A header may stand in the template's own words, such as its system prompt, before the messages before a turn,
        # or before a tool's answer (Falcon 3's calls stand behind the user's text, without one).
        positions_M, messages_M = evidence.origin.positions_M, evidence.origin.messages_M
        for place, begin in zip(places, begins, strict=True):
            if (positions_M[messages_M == place - 1] > begin).any() or (positions_M[messages_M == place] < begin).any():
                return None
        return begins

    def _behind_prompt(self, evidence: _Evidence, place: int, conversation: Conversation) -> int:
        """Beginning of the turn of message `place`: after the messages before it and the generation prompt.

        The two renderings are aligned at the last character of those messages: a template may write earlier ones
        differently.
        """
        if place == 0:  # templates read the first message, and there is none before this one
            before_text = next(iter(evidence.origin.positions_M.tolist()), 0)
            for header in self._habits.headers:
                at = evidence.masked.rfind(header, 0, before_text)
                if at >= 0:
                    return at + len(header)
            is_first = len(evidence.origin.messages_M) and evidence.origin.messages_M[0] == 0
            if is_first and not self._habits.headers and not conversation.messages[0].get("tool_calls"):
                return before_text
        earlier = self._render(conversation, evidence.masks.messages[:place], generation_prompt=True).text
        before = evidence.origin.positions_M[evidence.origin.messages_M < place]
        begin = int(before.max()) + 1 if len(before) else 0
        tail = _MASKED.split(earlier)[-1]
        tails = [tail + self._habits.missing_prompt]
        if self._habits.headers and tail.endswith(self._habits.headers[0]):
            tails += [tail.removesuffix(self._habits.headers[0]) + header for header in self._habits.headers[1:]]
        for known in tails:
            if evidence.masked.startswith(known, begin):
                return begin + len(known)
        shorter = _prompt_without_a_part(tail, evidence.masked[begin:])
        if shorter:
            return begin + shorter
        raise BadConversation(
            f"{conversation.where}, message {place + 1}: cannot tell where the assistant's turn begins: the generation "
            f"prompt after the messages before it ends in {tail[-60:]!r}, the whole conversation continues with "
            f"{evidence.plain[begin : begin + 60]!r}; put {{% generation %}} marks into the template, or leave the row "
            "out (--bad_conversations drop)"
        )

    # Where turns end, and the checks.

    def _ended(
        self, begun: Sequence[tuple[int, int, int]], evidence: _Evidence, conversation: Conversation
    ) -> tuple[AssistantTurn, ...]:
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
            close = max(last, marked_end)
            if conversation.messages[place].get("tool_calls"):
                close, end = self._end_by_itself(_Open(place, begin, last, limit), evidence, conversation)
            else:
                end = self._end_of_turn(evidence.masked, last, limit)
            ended = end is not None or (self._habits.is_open and place < len(conversation.messages) - 1)
            turns.append(AssistantTurn(place, begin, close if end is None else end, ended))
        return tuple(turns)

    def _end_of_turn(self, masked: str, begin: int, limit: int) -> int | None:
        if self._habits.is_open:
            match = next(self._specials(masked, begin, limit), None)
            return match.end() if match and match.group() not in self._habits.asking else None
        ends = [at + len(token) for token in self._habits.ends if (at := masked.find(token, begin, limit)) >= 0]
        if ends:
            return min(ends)
        other = self._habits.ending(masked, begin, limit)  # some templates end a turn with another token
        return other.end() if other else None

    def _end_by_itself(self, turn: _Open, evidence: _Evidence, conversation: Conversation) -> tuple[int, int | None]:
        """End of a turn whose last characters need not be masked: where it ends in the rendering of the conversation
        up to it; without and with the token that ends it, None where there is none."""
        own = self._own_text(turn, evidence, conversation)
        masked = evidence.masked
        if own is None:
            return turn.last, self._known_end(turn, evidence, conversation)
        same = turn.begin + len(commonprefix([own, masked[turn.begin :]]))
        if same < turn.begin + len(own):  # the template writes the last turn, or its end, otherwise
            end = self._last_end(masked, turn.last, same, known=True)
            match = next((m for m in self._specials(masked, turn.last, turn.limit) if m.end() > same), None)
            if end is None and match and match.start() <= same:
                end = match.end()
            return turn.last, self._known_end(turn, evidence, conversation) if end is None else end
        close = turn.begin + len(own)
        end = self._last_end(masked, turn.last, close)
        follows = self._habits.following(masked, close)
        if end is None and follows and follows.end() <= turn.limit:
            end = follows.end()
        return close, end

    def _known_end(self, turn: _Open, evidence: _Evidence, conversation: Conversation) -> int:
        """End of a call by the tokens that end answers. Raises BadConversation without one."""
        ends = [match.end() for match in self._specials(evidence.masked, turn.last, turn.limit)
                if match.group() in self._habits.ends]  # fmt: skip
        if not ends:
            raise BadConversation(
                f"{conversation.where}, message {turn.message + 1} (assistant): cannot tell where its call ends: the "
                "chat template writes the conversation up to it otherwise than with what follows; put "
                "{% generation %} marks into the template, or leave the row out (--bad_conversations drop)"
            )
        return ends[0]

    def _last_end(self, masked: str, begin: int, close: int, known: bool = False) -> int | None:
        """End of the special tokens with which the text before `close` ends: of the last one that ends answers, too;
        where there is none, of the last one, unless it ends a call of several. None without, and with `known` where
        only the latter is left."""
        last = []
        for match in reversed(list(self._specials(masked, begin, close))):
            if masked[match.end() : close].strip():
                break
            last.append(match)
            close = match.start()
        for match in last:
            if match.group() in self._habits.ends:
                return match.end()
        return last[0].end() if last and not known and not self._closes_calls(last[0].group()) else None

    def _closes_calls(self, token: str) -> bool:
        """True if the template writes a token behind each of two calls, and so ends no turn with it (DeepSeek R1's)."""
        if token not in self._closers:
            question, one, _ = _CALLED
            two = {**one, "tool_calls": [PROBE_CALL, {**PROBE_CALL, "id": "call00002"}]}
            texts = []
            for messages in forms_of_calls([question, two]):
                with contextlib.suppress(TemplateRefused):
                    texts.append(self._template.render(messages).text)
            self._closers[token] = any(text.count(token) > 1 for text in texts)
        return self._closers[token]

    def _own_text(self, turn: _Open, evidence: _Evidence, conversation: Conversation) -> str | None:
        """The text of a turn that ends a conversation, without thoughts and text that the template leaves out where
        more follows; None where it is not known."""
        *earlier, message = evidence.masks.messages[: turn.message + 1]
        for key in (*REASONING_KEYS, "content"):
            text = message.get(key)
            hidden = _MASKED.search(text) if isinstance(text, str) else None
            if hidden and hidden.group() not in evidence.masked[: turn.limit]:  # marks may begin behind a thought
                message = {name: value for name, value in message.items() if name != key}
                message = {**message, "content": ""} if key == "content" else message
        try:
            text = self._render(conversation, [*earlier, message], generation_prompt=False).text
        except BadConversation:
            return None
        before = evidence.origin.positions_M[evidence.origin.positions_M < turn.begin]
        known = evidence.masked[int(before[-1]) if len(before) else 0 : turn.begin]
        at = text.rfind(known)
        if at < 0 or (at and not len(before)):
            return None
        own = text[at + len(known) :]
        return own.removesuffix(self._habits.headers[0]) if self._habits.always_asks else own


@dataclass(frozen=True)
class _Open:
    """A turn whose end is looked for: its message, where it begins, the end of its last masked character, and where the
    next message's text or the next turn begins."""

    message: int
    begin: int
    last: int
    limit: int


def _unmarked_answers(
    marked: Sequence[tuple[int, int, int]], begins: Mapping[int, int], conversation: Conversation
) -> list[tuple[int, int, int]]:
    """Turns of answers without text, which hold their stop alone, where a template marks each text (MiniMax-Text-01's).
    As `_of_marks`; begins: by message."""
    without = {place: begin for place, begin in begins.items() if place not in {place for place, _, _ in marked}}
    messages = [conversation.messages[place] for place in without]
    if any(message.get("tool_calls") or str(message.get("content") or "").strip() for message in messages):
        return []  # it marks some of the turns
    return [(place, begin, begin) for place, begin in without.items()]


def _check(
    turns: Sequence[AssistantTurn], evidence: _Evidence, conversation: Conversation, literals: frozenset[str]
) -> tuple[int, bool]:
    """Raise BadConversation unless each text is in its turn; return how many texts beside calls are left out, and
    whether no call's arguments are as Python prints them. In shapes: C characters, M of them masked."""
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
    outside = set(origin.texts_M[~inside_M].tolist())
    turn_texts: dict[int, str] = {}
    for turn in turns:
        turn_texts[turn.message] = turn_texts.get(turn.message, "") + evidence.plain[turn.begin : turn.end]
    is_json = True
    for place, message in enumerate(conversation.messages):
        if message.get("tool_calls"):  # marks may leave a turn out, which is written all the same
            written_text = turn_texts.get(place, evidence.plain)
            is_json &= _check_calls(message, written_text, f"{where}, message {place + 1} ({message['role']})")
    return _check_texts(turn_texts, outside, evidence, conversation, literals=literals), is_json


def _check_texts(
    turn_texts: Mapping[int, str],
    outside: set[int],
    evidence: _Evidence,
    conversation: Conversation,
    *,
    literals: frozenset[str],
) -> int:
    """Raise BadConversation unless each text is written, in its turn and as it is; return how many texts beside calls
    are left out. turn_texts: by message. outside: texts of which a part is in no turn."""
    where, written, left_out = conversation.where, set(evidence.origin.texts_M.tolist()), 0
    # A template may cut a text at a tag that it looks for, as at </think>.
    tags = [literal for literal in literals if len(literal) > 2 and not literal.replace(" ", "").isalnum()]
    for number, masked in enumerate(evidence.masks.texts):
        message = conversation.messages[masked.message]
        named = f"{where}, message {masked.message + 1} ({message['role']})"
        cut = any(tag in masked.text for tag in tags)
        if masked.masked and number not in written and not cut:
            if not _may_vanish(message, masked.kind):
                raise BadConversation(f"{named}: the chat template omits its text: {masked.text[:60]!r}")
            left_out += masked.kind == "content"
        if message["role"] != "assistant" or number not in written:
            continue
        # Marks may omit thoughts, or whole turns; content that they mark must be marked whole.
        unmarked = evidence.marks and (masked.kind != "content" or masked.message not in turn_texts)
        if number in outside and not unmarked:
            raise BadConversation(f"{named}: part of the assistant's text lies outside its turn")
        if masked.kind != "content" or masked.message not in turn_texts:
            continue
        if not cut and masked.text.strip() not in turn_texts[masked.message]:
            raise BadConversation(
                f"{named}: the chat template changes the assistant's text: it becomes "
                f"{turn_texts[masked.message][:60]!r} and was {masked.text[:60]!r}"
            )
    return left_out


def _may_vanish(message: Message, kind: str) -> bool:
    """True for texts that templates may omit: earlier thoughts, and the text next to a tool call."""
    return kind == "reasoning" or (kind == "content" and bool(message.get("tool_calls")))


def _check_calls(message: Message, turn: str, named: str) -> bool:
    """Raise BadConversation unless a turn holds the calls of its message, each name and argument; return whether none
    of the arguments are as Python prints them."""
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    names = Counter(str(function["name"]) for function in functions if "name" in function)
    for name, times in names.items():
        if turn.count(name) < times:
            raise BadConversation(f"{named}: the chat template omits its call of '{name}'")
    if functions and message.get("content") is None:
        has_none = any("None" in json.dumps(function, default=str) or _holds_null(function) for function in functions)
        if _WRITTEN_NULL.match(turn) or ("None" in turn and not has_none):
            raise BadConversation(f"{named}: the chat template writes None for a call's missing text")
    is_json = True
    for function in functions:
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            if any(json.dumps(arguments, ensure_ascii=escaped) in turn for escaped in (False, True)):
                raise BadConversation(f"{named}: the chat template writes the arguments of a call as quoted text")
            if arguments.strip() not in turn:
                raise BadConversation(f"{named}: the chat template changes the arguments of a call: {arguments:.60}")
        elif missing := [value for value in _leaves(arguments) if not any(form in turn for form in _forms(value))]:
            raise BadConversation(
                f"{named}: the chat template omits {missing[0]!r:.60} of the arguments of its call of "
                f"'{function.get('name')}'"
            )
        elif arguments and str(arguments) in turn and json.dumps(arguments, ensure_ascii=False) not in turn:
            is_json = False
    return is_json


def _prompt_without_a_part(prompt: str, text: str) -> int:
    """Length of the beginning of a masked text that is the prompt without a part in its middle, as the tag that opens
    an empty thought (DeepSeek V3.2 behind a tool's answer); 0 where there is none."""
    same = len(commonprefix([prompt, text]))
    for begin in range(same + 1, len(prompt)):
        if prompt[begin:].strip() and text.startswith(prompt[begin:], same):
            return same + len(prompt) - begin
    return 0


def _leaves(value: Any) -> Iterator[Any]:
    """Numbers, truth values and nulls among arguments; of texts, the masks are looked for."""
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif not isinstance(value, str):
        yield value


def _holds_null(value: Any) -> bool:
    return any(leaf is None for leaf in _leaves(value))


def _forms(value: Any) -> tuple[str, ...]:
    """A number, truth value or null as JSON and as Python writes it."""
    return json.dumps(value, default=str), str(value)
