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
from functools import cached_property
from os.path import commonprefix
from typing import Any

import numpy as np

from training.utils.data.chat.habits import learn_habits
from training.utils.data.chat.rendering import (
    PROBE_CALL,
    PROBE_CALLED,
    ChatTemplate,
    Rendering,
    TemplateRefused,
    mask_messages,
)
from training.utils.data.formats.messages import REASONING_KEYS, BadConversation, Conversation, Message, forms_of_calls

_WRITTEN_NULL = re.compile(r"\s*(None|null|undefined)\b")
_MASKED = re.compile(r"[\U000f0000-\U0010ffff]")


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


class TurnFinder:
    """Finds the assistant's turns in conversations that one template renders.

    ends: all tokens that end a turn; the first one ends the last turn of a conversation.
    """

    def __init__(
        self,
        template: ChatTemplate,
        special_tokens: Sequence[str],
        end_token: str | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        """See `learn_habits` for the arguments and exceptions."""
        self.template = template
        self.habits = learn_habits(template, special_tokens, end_token, added_tokens)
        self.ends = self.habits.ends
        self._closers: dict[str, bool] = {}  # tokens, and whether each closes every call of a turn

    @property
    def asks_more(self) -> bool:
        """True if the generation prompt may hold more than the header of an assistant's message."""
        return len(self.habits.headers) > 1

    def prompt(self, conversation: Conversation) -> str:
        """The rendering with the generation prompt, which a model is to answer. Raises BadConversation."""
        rendered = self.render(conversation, conversation.messages, generation_prompt=True)
        return rendered.text + self.habits.missing_prompt

    def render(
        self, conversation: Conversation, messages: Sequence[Message], generation_prompt: bool, marks: bool = False
    ) -> Rendering:
        """The rendering of messages with the tools of a conversation. Raises BadConversation."""
        try:
            return self.template.render(messages, conversation.tools, generation_prompt, marks)
        except TemplateRefused as refused:
            raise BadConversation(
                f"{conversation.where}: the chat template refuses the conversation: {refused}"
            ) from refused

    def read(self, conversation: Conversation, generation_prompt: bool = False) -> ReadConversation:
        """Render a conversation and find the assistant's turns in it.

        With `generation_prompt` the text is that of `prompt`. Raises BadConversation, which names the row, if the
        template refuses the conversation or its turns are ambiguous.
        """
        refusals, second_best = [], None
        for messages in forms_of_calls(conversation.messages):
            try:
                reading = _Reading(self, replace(conversation, messages=messages), generation_prompt)
                read, is_json = reading.conversation_and_form()
            except BadConversation as refused:
                refusals.append(refused)
                continue
            if is_json:
                return read
            second_best = second_best or read
        if second_best is None:  # the template's own refusal may be that of a form alone
            raise next((each for each in refusals if not isinstance(each.__cause__, TemplateRefused)), refusals[0])
        return second_best

    @cached_property
    def call_end(self) -> str:
        """The token that ends a call where the template leaves it open: with which it begins a tool's answer. "" where
        it leaves no answer open and ends a call by something else."""
        added = self.ends[0] if self.habits.is_open else ""
        try:
            read = self.read(Conversation(list(PROBE_CALLED), "a probe of calls"), generation_prompt=True)
        except BadConversation:
            return added
        turn = read.turns[0]
        match = next((m for m in self.habits.specials(read.text, turn.begin) if m.end() == turn.end), None)
        return match.group() if turn.ended and match and match.group() not in self.habits.asking else added

    def closes_calls(self, token: str) -> bool:
        """True if the template writes a token behind each of two calls, and so ends no turn with it (DeepSeek R1's)."""
        if token not in self._closers:
            question, one, _ = PROBE_CALLED
            two = {**one, "tool_calls": [PROBE_CALL, {**PROBE_CALL, "id": "call00002"}]}
            texts = []
            for messages in forms_of_calls([question, two]):
                with contextlib.suppress(TemplateRefused):
                    texts.append(self.template.render(messages).text)
            self._closers[token] = any(text.count(token) > 1 for text in texts)
        return self._closers[token]


class _Reading:
    """A rendering of a conversation and its masked copy, of the same length, and the turns that are found in it. The
    template wrote the characters that are not masked.

    In shapes: C characters, M of them masked.
    """

    def __init__(self, finder: TurnFinder, conversation: Conversation, generation_prompt: bool) -> None:
        """Raises BadConversation where the template refuses it, or it is unknown who wrote what."""
        self._finder, self._template, self._habits = finder, finder.template, finder.habits
        self._conversation, self._messages, self._where = conversation, conversation.messages, conversation.where
        self._asks = generation_prompt
        self._places = [n for n, message in enumerate(self._messages) if message["role"] == "assistant"]
        self._plain = finder.render(conversation, self._messages, generation_prompt).text
        literals = self._template.literals
        # All texts are masked; then all but the literals that the template looks for; then no tool arguments either,
        # which some templates write as Python literals.
        for unmasked, arguments in ((frozenset[str](), True), (literals, True), (literals, False)):
            self._masks = mask_messages(self._messages, self._where, unmasked, arguments)
            try:
                rendered = finder.render(
                    conversation, self._masks.messages, generation_prompt, self._template.has_marks
                )
            except BadConversation:
                continue  # a template that inspects a text may refuse the masked one
            self._masked, self._marks = rendered.text, rendered.marks
            origin = self._masks.provenance(self._masked, self._plain)
            if origin is not None:
                self._positions_M, self._texts_M, self._messages_M = origin
                return
        raise BadConversation(
            f"{self._where}: the chat template's output depends on the texts, so the author of each part is unclear; "
            "change the template, or drop such rows (--bad_conversations drop)"
        )

    def conversation_and_form(self) -> tuple[ReadConversation, bool]:
        """The conversation with its turns, and whether no call's arguments are written as Python would print them.
        Raises BadConversation."""
        if self._marks:
            begun = self._of_marks()
        else:
            begins = self._behind_headers(self._asks) or [self._behind_prompt(place) for place in self._places]
            begun = [(place, begin, begin) for place, begin in zip(self._places, begins, strict=True)]
        turns, text = self._ended(begun), self._plain
        left_out, is_json = self._check(turns)
        if self._asks:
            text += self._habits.missing_prompt
        elif turns and not turns[-1].ended and turns[-1].message == len(self._messages) - 1:
            # The token that ends the last turn, where the template leaves it open.
            end = self._finder.ends[0] if self._habits.is_open else ""
            end = self._finder.call_end if self._messages[-1].get("tool_calls") else end
            text += end
            turns[-1] = replace(turns[-1], end=len(text), ended=True) if end else turns[-1]
        return ReadConversation(text, tuple(turns), self._messages, left_out), is_json

    # Where turns begin.

    def _of_marks(self) -> list[tuple[int, int, int]]:
        """The template's marks as (message, begin, end)."""
        begun: list[tuple[int, int, int]] = []
        marks = [mark for mark in self._marks if mark[0] < mark[1]]
        begins = self._known_begins()
        for number, (begin, end) in enumerate(marks):
            low, high = np.searchsorted(self._positions_M, [begin, end])
            if low < high:
                place = int(self._messages_M[low])
            elif any(known <= end for known in begins.values()):
                place = max(place for place, known in begins.items() if known <= end)
            elif len(marks) == len(self._places):
                place = self._places[number]
            else:  # a mark around a tool call without texts belongs to the turn before it
                place = begun[-1][0] if begun else self._places[0] if self._places else 0
            begun.append((place, begin, end))
        if any(place not in self._places for place, _, _ in begun):
            raise BadConversation(
                f"{self._where}: the chat template's {{% generation %}} marks contain a message from a role other than "
                "the assistant"
            )
        if not begins:
            heads = self._habits.headers
            return [
                (place, begin + next((len(head) for head in heads if self._masked.startswith(head, begin)), 0), end)
                for place, begin, end in begun
            ]
        # Marks may begin before the prompt ends, and mark what follows a turn that has ended (Phi-3's <|endoftext|>).
        clipped: list[tuple[int, int, int]] = []
        for place, begin, end in begun:
            before = clipped[-1] if clipped and clipped[-1][0] == place else None
            ended = before and self._masked[: before[2]].rstrip().endswith(self._finder.ends)
            if ended and not _MASKED.search(self._masked, begin, end):
                continue
            clipped.append((place, min(end, begin if before else max(begin, begins.get(place, begin))), end))
        # A template that marks each text leaves answers without text, which hold their stop alone, unmarked
        # (MiniMax-Text-01's).
        marked = {place for place, _, _ in clipped}
        unmarked = [place for place in begins if place not in marked]
        messages = [self._messages[place] for place in unmarked]
        if not any(message.get("tool_calls") or str(message.get("content") or "").strip() for message in messages):
            clipped += [(place, begins[place], begins[place]) for place in unmarked]
        return sorted(clipped, key=lambda mark: mark[1])

    def _known_begins(self) -> dict[int, int]:
        """Beginnings of messages' turns that are found without the marks."""
        begins = self._behind_headers(False)
        if begins:
            return dict(zip(self._places, begins, strict=True))
        known = {}
        for place in self._places:
            with contextlib.suppress(BadConversation):
                known[place] = self._behind_prompt(place)
        return known

    def _behind_headers(self, asks: bool) -> list[int] | None:
        """Ends of the template's assistant headers; None if they do not fit the assistant's messages. asks: the
        generation prompt is one of them."""
        headers, masked = self._habits.headers, self._masked
        if not headers:
            return None
        begins = []
        for match in re.finditer(re.escape(headers[-1]), masked):
            header = next(header for header in headers if masked.startswith(header, match.start()))
            begins.append(match.start() + len(header))
        asks = self._habits.always_asks or (asks and not self._habits.missing_prompt)
        if asks and begins and begins[-1] == len(masked):
            begins.pop()
        if len(begins) != len(self._places):
            return None
        # A header may stand in the template's own words, such as its system prompt, before the messages before a turn,
        # or before a tool's answer (Falcon 3's calls stand behind the user's text, without one).
        for place, begin in zip(self._places, begins, strict=True):
            before_M, own_M = self._messages_M == place - 1, self._messages_M == place
            if (self._positions_M[before_M] > begin).any() or (self._positions_M[own_M] < begin).any():
                return None
        return begins

    def _behind_prompt(self, place: int) -> int:
        """Beginning of the turn of message `place`: after the messages before it and the generation prompt.

        The two renderings are aligned at the last character of those messages: a template may write earlier ones
        differently.
        """
        headers = self._habits.headers
        if place == 0:  # templates read the first message, and there is none before this one
            before_text = next(iter(self._positions_M.tolist()), 0)
            for header in headers:
                at = self._masked.rfind(header, 0, before_text)
                if at >= 0:
                    return at + len(header)
            is_first = len(self._messages_M) and self._messages_M[0] == 0
            if is_first and not headers and not self._messages[0].get("tool_calls"):
                return before_text
        earlier = self._finder.render(self._conversation, self._masks.messages[:place], generation_prompt=True).text
        before = self._positions_M[self._messages_M < place]
        begin = int(before.max()) + 1 if len(before) else 0
        tail = _MASKED.split(earlier)[-1]
        tails = [tail + self._habits.missing_prompt]
        if headers and tail.endswith(headers[0]):
            tails += [tail.removesuffix(headers[0]) + header for header in headers[1:]]
        for known in tails:
            if self._masked.startswith(known, begin):
                return begin + len(known)
        shorter = _prompt_without_a_part(tail, self._masked[begin:])
        if shorter:
            return begin + shorter
        raise BadConversation(
            f"{self._where}, message {place + 1}: cannot tell where the assistant's turn begins: the generation prompt "
            f"after the previous messages ends in {tail[-60:]!r}, but the whole conversation continues with "
            f"{self._plain[begin : begin + 60]!r}; add {{% generation %}} marks to the template, or drop such rows "
            "(--bad_conversations drop)"
        )

    # Where turns end.

    def _ended(self, begun: Sequence[tuple[int, int, int]]) -> list[AssistantTurn]:
        """Extend each turn to the end of its end-of-turn token; if a message has several turns, only the last."""
        turns = []
        for number, (place, begin, marked_end) in enumerate(begun):
            following = begun[number + 1] if number + 1 < len(begun) else None
            if following and following[0] == place:
                turns.append(AssistantTurn(place, begin, marked_end, ended=True))
                continue
            # Up to the next turn, or to a character of another message.
            limit = following[1] if following else len(self._masked)
            later = np.searchsorted(self._positions_M, begin)
            positions, messages = self._positions_M[later:], self._messages_M[later:]
            limit = min([limit, *positions[messages != place][:1].tolist()])
            own = positions[(messages == place) & (positions < limit)]
            last = int(own[-1]) + 1 if len(own) else begin
            if self._messages[place].get("tool_calls"):
                close, end = self._end_by_itself(place, begin, last, limit)
            else:
                close, end = max(last, marked_end), self._end_of_turn(last, limit)
            ended = end is not None or (self._habits.is_open and place < len(self._messages) - 1)
            turns.append(AssistantTurn(place, begin, close if end is None else end, ended))
        return turns

    def _end_of_turn(self, begin: int, limit: int) -> int | None:
        if self._habits.is_open:
            match = next(self._habits.specials(self._masked, begin, limit), None)
            return match.end() if match and match.group() not in self._habits.asking else None
        ends = [at + len(token) for token in self._finder.ends if (at := self._masked.find(token, begin, limit)) >= 0]
        if ends:
            return min(ends)
        other = self._habits.ending(self._masked, begin, limit)  # some templates end a turn with another token
        return other.end() if other else None

    def _end_by_itself(self, place: int, begin: int, last: int, limit: int) -> tuple[int, int | None]:
        """End of a turn whose last characters need not be masked: where it ends in the rendering of the conversation
        up to it; without and with the token that ends it, None where there is none.

        last: the end of its last masked character. limit: where the next message's text or the next turn begins.
        """
        own = self._own_text(place, begin, limit)
        if own is None:
            return last, self._known_end(place, last, limit)
        same = begin + len(commonprefix([own, self._masked[begin:]]))
        if same < begin + len(own):  # the template writes the last turn, or its end, otherwise
            end = self._last_end(last, same, known=True)
            match = next((m for m in self._habits.specials(self._masked, last, limit) if m.end() > same), None)
            if end is None and match and match.start() <= same:
                end = match.end()
            return last, self._known_end(place, last, limit) if end is None else end
        end = self._last_end(last, same)
        follows = self._habits.following(self._masked, same)
        if end is None and follows and follows.end() <= limit:
            end = follows.end()
        return same, end

    def _known_end(self, place: int, begin: int, limit: int) -> int:
        """End of a call by the tokens that end answers. Raises BadConversation without one."""
        for match in self._habits.specials(self._masked, begin, limit):
            if match.group() in self._finder.ends:
                return match.end()
        raise BadConversation(
            f"{self._where}, message {place + 1} (assistant): cannot tell where its tool call ends: the chat "
            "template writes the messages up to it differently when others follow; add {% generation %} marks to the "
            "template, or drop such rows (--bad_conversations drop)"
        )

    def _last_end(self, begin: int, close: int, known: bool = False) -> int | None:
        """End of the special tokens with which the text before `close` ends: of the last one that ends answers, too;
        where there is none, of the last one, unless it ends a call of several. None without, and with `known` where
        only the latter is left."""
        last = []
        for match in reversed(list(self._habits.specials(self._masked, begin, close))):
            if self._masked[match.end() : close].strip():
                break
            last.append(match)
            close = match.start()
        for match in last:
            if match.group() in self._finder.ends:
                return match.end()
        return last[0].end() if last and not known and not self._finder.closes_calls(last[0].group()) else None

    def _own_text(self, place: int, begin: int, limit: int) -> str | None:
        """The text of a turn that ends a conversation, without thoughts and text that the template leaves out where
        more follows; None where it is not known."""
        *earlier, message = self._masks.messages[: place + 1]
        for key in (*REASONING_KEYS, "content"):
            text = message.get(key)
            hidden = _MASKED.search(text) if isinstance(text, str) else None
            if hidden and hidden.group() not in self._masked[:limit]:  # marks may begin behind a thought
                message = {name: value for name, value in message.items() if name != key}
                message = {**message, "content": ""} if key == "content" else message
        try:
            text = self._finder.render(self._conversation, [*earlier, message], generation_prompt=False).text
        except BadConversation:
            return None
        before = self._positions_M[self._positions_M < begin]
        known = self._masked[int(before[-1]) if len(before) else 0 : begin]
        at = text.rfind(known)
        if at < 0 or (at and not len(before)):
            return None
        own = text[at + len(known) :]
        return own.removesuffix(self._habits.headers[0]) if self._habits.always_asks else own

    # The checks.

    def _check(self, turns: Sequence[AssistantTurn]) -> tuple[int, bool]:
        """Raise BadConversation unless each text is in its turn; return how many texts beside calls are left out, and
        whether no call's arguments are as Python prints them."""
        owner_C = np.full(len(self._plain), -1)  # the message whose turn a character is in
        turn_texts: dict[int, str] = {}
        for turn in turns:
            owner_C[turn.begin : turn.end] = turn.message
            turn_texts[turn.message] = turn_texts.get(turn.message, "") + self._plain[turn.begin : turn.end]
        owner_M = owner_C[self._positions_M]
        wrong_M = (owner_M >= 0) & (owner_M != self._messages_M)
        if wrong_M.any():
            place = int(self._messages_M[wrong_M][0])
            raise BadConversation(
                f"{self._where}: an assistant turn would include text of message {place + 1} "
                f"({self._messages[place]['role']}), because the chat template mixes the two"
            )
        is_json = True
        for place, message in enumerate(self._messages):
            if message.get("tool_calls"):  # marks may leave a turn out, which is written all the same
                is_json &= _check_calls(message, turn_texts.get(place, self._plain), self._named(place))
        return self._check_texts(turn_texts, set(self._texts_M[owner_M < 0].tolist())), is_json

    def _check_texts(self, turn_texts: Mapping[int, str], outside: set[int]) -> int:
        """Raise BadConversation unless each text is written, in its turn and as it is; return how many texts beside
        calls are left out. turn_texts: by message. outside: texts of which a part is in no turn."""
        written, left_out = set(self._texts_M.tolist()), 0
        # A template may cut a text at a tag that it looks for, as at </think>.
        literals = self._template.literals
        tags = [literal for literal in literals if len(literal) > 2 and not literal.replace(" ", "").isalnum()]
        for number, masked in enumerate(self._masks.texts):
            message, named = self._messages[masked.message], self._named(masked.message)
            cut = any(tag in masked.text for tag in tags)
            if masked.masked and number not in written and not cut:
                # Templates may omit earlier thoughts, and the text next to a tool call.
                may_vanish = masked.kind == "reasoning" or (masked.kind == "content" and message.get("tool_calls"))
                if not may_vanish:
                    raise BadConversation(f"{named}: the chat template omits its text: {masked.text[:60]!r}")
                left_out += masked.kind == "content"
            if message["role"] != "assistant" or number not in written:
                continue
            # Marks may omit thoughts, or whole turns; content that they mark must be marked whole.
            is_content = masked.kind == "content" and masked.message in turn_texts
            if number in outside and (is_content or not self._marks):
                raise BadConversation(f"{named}: part of the assistant's text lies outside its turn")
            if is_content and not cut and masked.text.strip() not in turn_texts[masked.message]:
                raise BadConversation(
                    f"{named}: the chat template changes the assistant's text from "
                    f"{masked.text[:60]!r} to {turn_texts[masked.message][:60]!r}"
                )
        return left_out

    def _named(self, place: int) -> str:
        return f"{self._where}, message {place + 1} ({self._messages[place]['role']})"


def _check_calls(message: Message, turn: str, named: str) -> bool:
    """Raise BadConversation unless a turn holds the calls of its message, each name and argument; return whether none
    of the arguments are as Python prints them."""
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    names = Counter(str(function["name"]) for function in functions if "name" in function)
    for name, times in names.items():
        if turn.count(name) < times:
            raise BadConversation(f"{named}: the chat template omits its call to '{name}'")
    if functions and message.get("content") is None:
        has_none = any(
            "None" in json.dumps(function, default=str) or None in _leaves(function) for function in functions
        )
        if _WRITTEN_NULL.match(turn) or ("None" in turn and not has_none):
            raise BadConversation(f"{named}: the chat template writes None where a tool call has no text")
    is_json = True
    for function in functions:
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            if any(json.dumps(arguments, ensure_ascii=escaped) in turn for escaped in (False, True)):
                raise BadConversation(f"{named}: the chat template writes a tool call's arguments as a quoted string")
            if arguments.strip() not in turn:
                raise BadConversation(f"{named}: the chat template changes a tool call's arguments: {arguments:.60}")
        elif missing := [value for value in _leaves(arguments)
                         if json.dumps(value, default=str) not in turn and str(value) not in turn]:  # fmt: skip
            raise BadConversation(
                f"{named}: the chat template omits {missing[0]!r:.60} from the arguments of its call to "
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
