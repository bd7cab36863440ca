"""Which characters of a rendered conversation the assistant writes, turn by turn.

A turn is what a model must write when it answers: it begins where the generation prompt ends and ends with the
end-of-turn token. So the marks around a tool call or a thought (`<tool_call>`, `<think>`) belong to it where the
template writes them, and the header before it does not. Knows nothing of token ids.

How turns are found, from one rendering of the whole conversation:
1. The conversation is rendered as it is and with its texts masked (see `chat_rendering`). Both must agree
   character for character; from then on it is known who wrote what.
2. Turns begin at the template's `{% generation %}` marks where it has them, otherwise behind each assistant
   header that the template wrote. What the header is, a probe conversation shows (`_learn`). Where the headers do
   not match the assistant's messages (a template without a header, say), each turn begins where the rendering of
   the messages before it, with the generation prompt, ends.
3. A turn ends with the first end-of-turn token that the template wrote behind the last character of the message.
4. Checked on every row: a turn holds every character that is left of its message's texts and no character of
   another message; what the assistant wrote is there; no message has vanished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np

from training.utils.data.chat_rendering import (
    ChatTemplate,
    MaskedMessages,
    Provenance,
    Rendering,
    TemplateRefused,
    mask_messages,
)
from training.utils.data.conversations import BadConversation, Conversation, Message
from training.utils.run.errors import ThreestepError


@dataclass(frozen=True)
class Turn:
    """Characters [begin, end) of a rendering that the assistant writes. `message`: the place of its message.

    `ended`: whether they end with an end-of-turn token.
    """

    message: int
    begin: int
    end: int
    ended: bool


@dataclass(frozen=True)
class ReadConversation:
    """A rendered conversation and the assistant's turns in it, in order (`{% generation %}` marks may make
    several of one message)."""

    text: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class _Evidence:
    """One rendering with its masked twin: same length, `masked` shows what the template wrote itself."""

    plain: str
    masked: str
    masks: MaskedMessages
    origin: Provenance
    marks: list[tuple[int, int]]


class TurnFinder:
    """Finds the assistant's turns in conversations that one template renders."""

    def __init__(self, template: ChatTemplate, special_tokens: Sequence[str], end_token: str | None = None) -> None:
        """`special_tokens`: texts of the tokenizer's special tokens, of which one ends a turn; `end_token`: which,
        where the user says so.

        Raises ThreestepError where the template ends the last turn with none of them.
        """
        self._template = template
        longest_first = sorted({*special_tokens, *([end_token] if end_token else [])}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._headers: tuple[str, ...] = ()
        self._missing_prompt = ""
        self._openings: frozenset[str] = frozenset()
        self._ends: tuple[str, ...] = (end_token,) if end_token else ()
        self._learn(end_token)

    @property
    def end_token(self) -> str:
        """The token that ends the last turn of a conversation."""
        return self._ends[0]

    # What the template does with a conversation of single letters.

    def _learn(self, end_token: str | None) -> None:
        """Learn headers and ends from user a, assistant b, user c, assistant d.

        `_headers`: what the generation prompt adds, and those beginnings of it that stand before b and d where
        that is not the whole (a thought that the generation prompt opens), longest first. `_missing_prompt`: the
        header of a template that writes one before b and ignores add_generation_prompt. `_openings`: special
        tokens that begin a message, and so never end one.
        """
        letters = [{"role": "assistant" if c in "bd" else "user", "content": c} for c in "abcd"]
        probe = mask_messages(letters, "probe")
        a, b, c, d = (str(message["content"]) for message in probe.messages)
        try:
            whole = self._template.render(probe.messages).text
            open_a, open_c = (self._template.render(probe.messages[:n], generation_prompt=True).text for n in (1, 3))
            closed_c = self._template.render(probe.messages[:3]).text
        except TemplateRefused as refused:
            if end_token is None:
                raise ThreestepError(
                    "the chat template refuses a conversation of user and assistant in turn, so the token that ends "
                    f"a turn cannot be learnt from it ({refused}); name it with --end_of_conversation_token"
                ) from refused
            return
        if [whole.count(letter) for letter in (a, b, c, d)] != [1, 1, 1, 1]:
            raise ThreestepError(
                "the chat template does not write each message of a conversation of user and assistant once; it "
                "cannot be used for training"
            )
        before_b, before_d = _between(whole, a, b), _between(whole, c, d)
        prompt_b, prompt_d = open_a.partition(a)[2], open_c.partition(c)[2]
        prompt = open_c.removeprefix(closed_c)
        if prompt == open_c or not prompt:
            prompt = ""
            if before_b.startswith(prompt_b) and before_b[len(prompt_b) :].strip():
                self._missing_prompt = before_b[len(prompt_b) :]
        if prompt:
            shared = [
                self._whole_words(commonprefix([before, asked])[len(asked) - len(prompt) :], prompt)
                for before, asked in ((before_b, prompt_b), (before_d, prompt_d))
            ]
            self._headers = tuple(sorted({prompt, *filter(None, shared)}, key=len, reverse=True))
        elif self._missing_prompt:
            self._headers = (self._missing_prompt,)
        self._learn_openings(whole.partition(a)[0], _between(whole, b, c), whole.partition(d)[2])
        self._learn_ends(_between(whole, b, c), whole.partition(d)[2], end_token)

    def _whole_words(self, beginning: str, prompt: str) -> str:
        """A beginning of the generation prompt, cut back to a blank or a special token: "<think>" and "<answer>"
        share a character that is no header's."""
        if beginning == prompt:
            return prompt
        special = self._special.pattern if self._special else r"\s"
        match = re.match(rf"(?s).*(?:\s|{special})", beginning)
        return match.group() if match else ""

    def _learn_openings(self, before_a: str, after_b: str, after_d: str) -> None:
        """Special tokens that stand in a header, or between b and c behind the one that ends b's turn (where the
        first of them ends it), and not after the whole conversation."""
        if self._special is None:
            return
        openings = {*self._special.findall("".join(self._headers[:1])), *self._special.findall(before_a)[-1:]}
        between = self._special.findall(after_b)
        openings |= set(between if between and between[0] in openings else between[1:])
        self._openings = frozenset(openings.difference(self._special.findall(after_d)))

    def _learn_ends(self, after_b: str, after_d: str, end_token: str | None) -> None:
        if end_token is not None:
            if end_token not in after_d:
                raise ThreestepError(
                    f"end_of_conversation_token: the chat template writes {after_d!r} after the assistant's last text "
                    f"and not '{end_token}'; leave the flag out, or change the template"
                )
            return
        found = [self._ending(text, 0, len(text)) for text in (after_d, after_b)]
        if found[0] is None:
            raise ThreestepError(
                f"the chat template writes {after_d!r} after the assistant's last text, and that holds no special "
                "token of the tokenizer to end a turn with: a model would never learn to stop; change the template "
                "(--chat_template FILE), or name a token of that text with --end_of_conversation_token"
            )
        self._ends = tuple(dict.fromkeys(match.group() for match in found if match is not None))

    # Conversations.

    def prompt(self, conversation: Conversation) -> str:
        """The rendering with the generation prompt: what a model is given to answer. Raises BadConversation."""
        rendered = self._render(conversation, conversation.messages, generation_prompt=True)
        return rendered.text + self._missing_prompt

    def read(self, conversation: Conversation, generation_prompt: bool = False) -> ReadConversation:
        """Render a conversation and find the assistant's turns in it.

        With `generation_prompt` the text is that of `prompt`, and the turns are those that it answers. Raises
        BadConversation, which names the row, where the template refuses it or its turns cannot be told for sure.
        """
        evidence = self._evidence(conversation, generation_prompt)
        spoken = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if evidence.marks:
            begun = self._of_marks(evidence, spoken, conversation)
        else:
            begins = self._behind_headers(evidence, len(spoken), generation_prompt)
            if begins is None:
                begins = [self._behind_prompt(evidence, place, conversation) for place in spoken]
            begun = [(place, begin, begin) for place, begin in zip(spoken, begins, strict=True)]
        turns = self._ended(begun, evidence)
        self._check(turns, evidence, conversation)
        return ReadConversation(evidence.plain + (self._missing_prompt if generation_prompt else ""), turns)

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
                continue  # a template may refuse a masked text where it asks what the text holds
            origin = masks.provenance(masked.text, plain)
            if origin is not None:
                return _Evidence(plain, masked.text, masks, origin, masked.marks)
        raise BadConversation(
            f"{conversation.where}: what the chat template writes depends on the texts in a way that hides which part "
            "is whose; change the template, or leave such rows out (--bad_conversations drop)"
        )

    def _maskings(self, conversation: Conversation) -> Iterator[MaskedMessages]:
        """Everything masked, then with what the template asks for left readable, then without tool arguments,
        which some templates write as Python does."""
        messages, where = conversation.messages, conversation.where
        yield mask_messages(messages, where)
        yield mask_messages(messages, where, self._template.asked_for)
        yield mask_messages(messages, where, self._template.asked_for, arguments=False)

    # Where turns begin.

    def _of_marks(
        self, evidence: _Evidence, spoken: Sequence[int], conversation: Conversation
    ) -> list[tuple[int, int, int]]:
        """The template's own marks as (message, begin, end)."""
        begun: list[tuple[int, int, int]] = []
        for number, (begin, end) in enumerate(evidence.marks):
            inside = _messages_inside(evidence.origin, begin, end)
            if len(inside):
                place = int(inside[0])
            elif len(evidence.marks) == len(spoken):
                place = spoken[number]
            else:  # nothing tells: a mark around a tool call without texts belongs to what is around it
                place = begun[-1][0] if begun else spoken[0] if spoken else 0
            begun.append((place, begin, end))
        if any(place not in spoken for place, _, _ in begun):
            raise BadConversation(
                f"{conversation.where}: the chat template's {{% generation %}} marks hold a message that is not the "
                "assistant's"
            )
        return begun

    def _behind_headers(self, evidence: _Evidence, turns: int, generation_prompt: bool) -> list[int] | None:
        """Where the template's assistant headers end; None where they are not as many as the turns."""
        if not self._headers:
            return None
        begins = []
        for match in re.finditer(re.escape(self._headers[-1]), evidence.masked):
            header = next(header for header in self._headers if evidence.masked.startswith(header, match.start()))
            begins.append(match.start() + len(header))
        if generation_prompt and not self._missing_prompt and begins and begins[-1] == len(evidence.masked):
            begins.pop()
        return begins if len(begins) == turns else None

    def _behind_prompt(self, evidence: _Evidence, place: int, conversation: Conversation) -> int:
        """Where the generation prompt behind the messages before `place` ends in the whole rendering.

        The two are laid upon each other at the last character of those messages, so a template may write
        earlier messages differently in the two.
        """
        earlier = self._render(conversation, evidence.masks.messages[:place], generation_prompt=True).text
        own = evidence.origin.positions_M[evidence.origin.messages_M < place]
        begin = int(own.max()) + 1 if len(own) else 0
        tail = earlier[_last_mask(earlier) + 1 :]
        tails = [tail + self._missing_prompt]
        if self._headers and tail.endswith(self._headers[0]):
            tails += [tail.removesuffix(self._headers[0]) + header for header in self._headers[1:]]
        for known in tails:
            if evidence.masked.startswith(known, begin):
                return begin + len(known)
        raise BadConversation(
            f"{conversation.where}, message {place + 1}: cannot tell where the assistant's turn begins: the generation "
            f"prompt after the messages before it ends in {tail[-60:]!r}, the whole conversation goes on with "
            f"{evidence.plain[begin : begin + 60]!r}; put {{% generation %}} marks into the template, or leave the row "
            "out (--bad_conversations drop)"
        )

    # Where turns end, and whether they are right.

    def _ended(self, begun: Sequence[tuple[int, int, int]], evidence: _Evidence) -> tuple[Turn, ...]:
        """Extend each turn to the end of its end-of-turn token; of several of one message, the last."""
        positions_M, messages_M = evidence.origin.positions_M, evidence.origin.messages_M
        turns = []
        for number, (place, begin, marked_end) in enumerate(begun):
            following = begun[number + 1] if number + 1 < len(begun) else None
            limit = following[1] if following else len(evidence.masked)
            later = np.searchsorted(positions_M, begin)
            foreign = positions_M[later:][messages_M[later:] != place]
            limit = min(limit, int(foreign[0])) if len(foreign) else limit
            own = positions_M[later:][(messages_M[later:] == place) & (positions_M[later:] < limit)]
            last = int(own[-1]) + 1 if len(own) else begin
            if following and following[0] == place:
                turns.append(Turn(place, begin, marked_end, ended=True))
                continue
            end = self._end_of_turn(evidence.masked, last, limit)
            turns.append(Turn(place, begin, end or max(last, marked_end), ended=end is not None))
        return tuple(turns)

    def _end_of_turn(self, masked: str, begin: int, limit: int) -> int | None:
        found = [at + len(token) for token in self._ends if (at := masked.find(token, begin, limit)) >= 0]
        if found:
            return min(found)
        other = self._ending(masked, begin, limit)  # some templates end a tool call otherwise than an answer
        return other.end() if other else None

    def _ending(self, text: str, begin: int, limit: int) -> re.Match[str] | None:
        """The first special token, unless it begins a message."""
        match = self._special.search(text, begin, limit) if self._special else None
        return match if match and match.group() not in self._openings else None

    def _check(self, turns: Sequence[Turn], evidence: _Evidence, conversation: Conversation) -> None:
        """Raise BadConversation unless each text is where it belongs."""
        origin, where = evidence.origin, conversation.where
        begins = np.array([turn.begin for turn in turns], np.int64)
        ends = np.array([turn.end for turn in turns], np.int64)
        owners = np.array([turn.message for turn in turns], np.int64)
        turn_M = np.searchsorted(begins, origin.positions_M, side="right") - 1
        inside_M = turn_M >= 0
        inside_M[inside_M] = origin.positions_M[inside_M] < ends[turn_M[inside_M]]
        wrong_M = inside_M.copy()
        wrong_M[inside_M] = owners[turn_M[inside_M]] != origin.messages_M[inside_M]
        if wrong_M.any():
            place = int(origin.messages_M[wrong_M][0])
            raise BadConversation(
                f"{where}: a turn of the assistant's would hold text of message {place + 1} "
                f"({conversation.messages[place]['role']}): the chat template writes them into each other"
            )
        written = set(origin.texts_M.tolist())
        outside = set(origin.texts_M[~inside_M].tolist())
        spoken = {place: "" for place in owners.tolist()}
        for turn in turns:
            spoken[turn.message] += evidence.plain[turn.begin : turn.end]
        for place in () if evidence.marks else spoken:
            for name in _called(conversation.messages[place]):
                if name not in spoken[place]:
                    raise BadConversation(
                        f"{where}, message {place + 1} (assistant): the chat template leaves its call of '{name}' out"
                    )
        for number, text in enumerate(evidence.masks.texts):
            message = conversation.messages[text.message]
            said = f"{where}, message {text.message + 1} ({message['role']})"
            cut = any(literal in text.text for literal in self._template.asked_for)
            if text.masked and number not in written and not (cut or _may_vanish(message, text.kind)):
                raise BadConversation(f"{said}: the chat template leaves its text out: {text.text[:60]!r}")
            if message["role"] != "assistant" or number not in written:
                continue
            # Marks may leave out thoughts, or whole turns; what they mark of a content must be all of it.
            left_out = evidence.marks and (text.kind != "content" or text.message not in spoken)
            if number in outside and not left_out:
                raise BadConversation(f"{said}: part of what the assistant wrote lies outside its turn")
            if text.kind != "content" or text.message not in spoken:
                continue
            if not cut and text.text.strip() not in spoken[text.message]:
                raise BadConversation(
                    f"{said}: the chat template changes the assistant's text: it becomes "
                    f"{spoken[text.message][:60]!r} and was {text.text[:60]!r}"
                )


def _may_vanish(message: Message, kind: str) -> bool:
    """Templates leave out earlier thoughts, and what is said beside a tool call."""
    return kind == "reasoning" or (kind == "content" and bool(message.get("tool_calls")))


def _called(message: Message) -> list[str]:
    """The names of the tools that a message calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    return [str(function["name"]) for function in functions if "name" in function]


def _messages_inside(origin: Provenance, begin: int, end: int) -> np.ndarray:
    low, high = np.searchsorted(origin.positions_M, [begin, end])
    return origin.messages_M[low:high]


def _between(text: str, one: str, other: str) -> str:
    return text[text.index(one) + len(one) : text.index(other)] if one in text and other in text else ""


def _last_mask(text: str) -> int:
    """The position of the last masked character; -1 where there is none."""
    return next((at for at in reversed(range(len(text))) if text[at] >= "\U000f0000"), -1)
