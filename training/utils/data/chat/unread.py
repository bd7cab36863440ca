"""The parts of a conversation that its chat template does not read: reasoning under another key, and tools.

Reasoning moves to the key that the template reads. Where the template reads none, or leaves out the reasoning of the
answer that a row is for, the row is trained without it. All of it is found by rendering, with marks in place of the
reasoning. Knows nothing of turns, tokens or kinds of rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from training.utils.data.chat.rendering import PROBE_CALL, PROBE_TOOL, ChatTemplate, TemplateRefused
from training.utils.data.formats.messages import REASONING_KEYS, Conversation, Message, forms_of_calls
from training.utils.data.rows.tokenize import Dropped

Read = tuple[Conversation, tuple[str, ...]]  # a conversation for the template, and notes for the report

MOVED = "whose reasoning moved to the key that the chat template reads"
OMITTED = "trained without the reasoning in their answer, which the chat template omits"
EMPTIED = "whose earlier answers carry no loss, because the chat template writes empty thoughts for their reasoning"
UNREAD_TOOLS = "whose tools the chat template omits"
UNREAD_NAMES = "with a speaker's name that the chat template omits"
UNREAD_VARIABLES = "with chat_template_kwargs that the chat template does not read"
REMEDIES = {
    "unread_reasoning": "the chat template omits the reasoning in their answers; use one that reads it "
    "(--chat_template FILE, --chat_template_kwargs)",
    OMITTED: "use a template that reads it (--chat_template FILE, --chat_template_kwargs), or put the "
    "reasoning into the message content",
    UNREAD_TOOLS: "the model cannot see its tools; use a template that writes them (--chat_template FILE)",
}

# Around reasoning that models write into their text: Qwen's and DeepSeek's tags, Mistral's, Cohere's, Kimi's, Seed's,
# and Claude's.
_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
)
_THOUGHT = "<think>\n{}\n</think>\n\n"
_PATTERNS = [(re.escape(begin), re.escape(end)) for begin, end in _TAGS]
_EMPTY = re.compile("(?:" + "|".join(rf"{begin}\s*{end}" for begin, end in _PATTERNS) + r")\s*\Z")
_INSIDE = re.compile(r"\s*(?:" + "|".join(rf"{begin}\s*(\S[\s\S]*?){end}" for begin, end in _PATTERNS) + ")")
_FIRST_MARK = 0xF0000  # private characters, which no template writes
_PARTS = "parts"  # Mistral's place of reasoning: a part of the content, of type "thinking"
_TOOL_NAME: str = PROBE_CALL["function"]["name"]
_QUESTION: Message = {"role": "user", "content": "a"}
_ANSWER: Message = {"role": "assistant", "content": "b"}


@dataclass(frozen=True)
class UnreadParts:
    """Finds what one template does not read, and moves reasoning."""

    template: ChatTemplate

    def of_prompt(self, conversation: Conversation) -> Read:
        """A conversation that is to be answered, its reasoning where the template reads it."""
        notes = (UNREAD_TOOLS,) if conversation.tools and not self._writes_tools(conversation) else ()
        if not self.template.names.issuperset(conversation.template_kwargs):
            notes = (*notes, UNREAD_VARIABLES)
        if self._loses_a_name(conversation):
            notes = (*notes, UNREAD_NAMES)
        if all(_marked(message, "") is None for message in conversation.messages):
            return conversation, notes
        keys, messages = _keys_read(self.template), conversation.messages
        if keys:
            messages = [_taken_apart(message) for message in messages] if _wants_keys(self.template) else messages
            messages = [_moved(message, keys) for message in messages]
        changed = replace(conversation, messages=messages)
        # A template may refuse reasoning where it takes the rest: gpt-oss's does beside the text of a call.
        if messages == conversation.messages or (
            self._text(changed, messages) is None and self._text(conversation, conversation.messages) is not None
        ):
            return conversation, notes
        return changed, (*notes, MOVED)

    def of_answer(self, conversation: Conversation, learns_all: bool = False) -> Read:
        """A conversation whose last answer is learnt, and with `learns_all` the earlier ones.

        No answer is learnt with an empty thought in place of its reasoning: earlier ones leave the loss, a row whose
        last one it is is dropped. Raises Dropped.
        """
        read, notes = self.of_prompt(conversation)
        reasoned = {place for place, message in enumerate(read.messages) if _marked(message, "") is not None}
        lost = reasoned - self._written(read, reasoned) - read.untrained
        last = _last_answer(read.messages)
        emptied = self._emptied(read, (reasoned if learns_all else reasoned & {last}) - read.untrained, lost)
        if emptied - {last}:
            read = replace(read, untrained=read.untrained | emptied - {last})
            notes = (*notes, EMPTIED)
        if last is None or last not in lost | emptied:
            asked = max((place for place, each in enumerate(read.messages) if each["role"] == "user"), default=-1)
            # gpt-oss's leaves out the reasoning of calls that a last answer follows.
            return read, (*notes, OMITTED) if learns_all and any(asked < place for place in lost) else notes
        if last in emptied:
            raise Dropped("unread_reasoning")
        return read, (*(note for note in notes if note != MOVED), OMITTED)

    def _writes_tools(self, conversation: Conversation) -> bool:
        written, messages = _writes_tools(self.template), conversation.messages
        return self._text(conversation, messages) != _text(self.template, messages) if written is None else written

    def _loses_a_name(self, conversation: Conversation) -> bool:
        """True if the template leaves out a message's name. A tool's is that of the call which it answers."""
        named = {
            place: {**message, "name": _mark(place)}
            for place, message in enumerate(conversation.messages)
            if message["role"] != "tool" and message.get("name") not in (None, "", message["role"])
        }
        text = self._with(conversation, named)
        return text is not None and any(_mark(place) not in text for place in named)

    def _written(self, conversation: Conversation, places: Iterable[int]) -> set[int]:
        """Those of `places` whose reasoning the template writes; all where it refuses the marks."""
        messages = conversation.messages
        marked = {place: _marked(messages[place], _mark(place)) or messages[place] for place in places}
        text = self._with(conversation, marked)
        return {place for place in marked if text is None or _mark(place) in text}

    def _emptied(self, conversation: Conversation, places: Collection[int], lost: Collection[int]) -> set[int]:
        """Those of `places` before whose content the template writes an empty thought that is not the prompt's. lost:
        places whose reasoning it leaves out."""
        if not places or _opens_empty(self.template) or not any(end in self.template.text for _, end in _TAGS):
            return set()
        messages = conversation.messages
        marked = {place: _before_text(messages[place], _mark(place), place in lost) for place in places}
        text = self._with(conversation, marked) or ""
        before = {place: text.partition(_mark(place))[0] for place in places if _mark(place) in text}
        return {place for place, written in before.items() if _EMPTY.search(written)}

    def _with(self, conversation: Conversation, changed: Mapping[int, Message]) -> str | None:
        """The rendering with other messages in some places; "" where there are none."""
        messages = [changed.get(place, message) for place, message in enumerate(conversation.messages)]
        return self._text(conversation, messages) if changed else ""

    def _text(self, conversation: Conversation, messages: Sequence[Message]) -> str | None:
        return _text(self.template, messages, conversation.tools)


def _text(template: ChatTemplate, messages: Sequence[Message], tools: Any = None) -> str | None:
    """The rendering, in the first form of its calls that the template takes; None where it takes none."""
    for written in forms_of_calls(messages):
        try:
            return template.render(written, tools).text
        except TemplateRefused:
            continue
    return None


def _mark(place: int) -> str:
    return chr(_FIRST_MARK + place)


def _last_answer(messages: Sequence[Message]) -> int | None:
    """The place of the last answer; None where somebody asks again behind it, and templates leave out reasoning."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == "assistant":
            return place
        if messages[place]["role"] != "tool":
            return None
    return None


# Reasoning in messages.


def _key_of(message: Message) -> str | None:
    """The key of an answer's reasoning."""
    if message["role"] != "assistant":
        return None
    return next((key for key in REASONING_KEYS if str(message.get(key) or "").strip()), None)


def _taken_apart(message: Message) -> Message:
    """The message with the reasoning with which its content begins under a key."""
    content = message["content"]
    inside = _INSIDE.match(content) if isinstance(content, str) and message["role"] == "assistant" else None
    if inside is None or inside.lastindex is None or _key_of(message) is not None:
        return message
    return {
        **message,
        "content": content[inside.end() :].lstrip("\n"),
        REASONING_KEYS[0]: inside[inside.lastindex].strip(),
    }


def _moved(message: Message, keys: Sequence[str]) -> Message:
    """The message with its reasoning under the first of `keys`, unless it has it under one of them."""
    key = _key_of(message)
    if key is None or any(str(message.get(read) or "").strip() for read in keys):
        return message
    without = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    return _under(keys[0], without, message[key])


def _under(key: str, message: Message, reasoning: str) -> Message:
    if key != _PARTS:
        return {**message, key: reasoning}
    content = message["content"] or ""
    parts = ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}


def _marked(message: Message, mark: str) -> Message | None:
    """An answer with `mark` in place of its reasoning, under whatever key or at the start of its content; or None."""
    if message["role"] != "assistant":
        return None
    if _key_of(message) is not None:
        return {**message, **{key: mark for key in REASONING_KEYS if key in message}}
    content = message["content"]
    if isinstance(content, list):
        first = content[0] if content else {}
        return {**message, "content": [{**first, "thinking": mark}, *content[1:]]} if "thinking" in first else None
    inside = _INSIDE.match(content or "")
    if inside is None or inside.lastindex is None:
        return None
    begin, end = inside.span(inside.lastindex)
    return {**message, "content": content[:begin] + mark + content[end:]}


def _before_text(message: Message, mark: str, behind_thought: bool) -> Message:
    """An answer with `mark` before its content, or behind the thought with which the content begins."""
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": mark}, *content]}
    inside = _INSIDE.match(content or "") if behind_thought else None
    at = inside.end() if inside else 0
    return {**message, "content": f"{(content or '')[:at]}{mark}{(content or '')[at:]}"}


# Habits of a template, each learnt once.


@lru_cache(maxsize=64)
def _keys_read(template: ChatTemplate) -> tuple[str, ...]:
    """The keys under which the template reads reasoning, of an answer or of a call; or the parts of the content."""
    mark = _mark(0)
    answers = [(_ANSWER, None), ({**_ANSWER, "content": "", "tool_calls": [PROBE_CALL]}, [PROBE_TOOL])]

    def written(key: str) -> str:
        texts = [_text(template, [_QUESTION, _under(key, answer, mark)], tools) or "" for answer, tools in answers]
        return "".join(text for text in texts if mark in text)

    keys = tuple(filter(written, REASONING_KEYS))
    parts = "" if keys else written(_PARTS)
    is_dumped = re.search("[\"']thinking[\"']", parts)  # content as it is, whatever it is: a list in Python or JSON
    return (_PARTS,) if parts and not is_dumped else keys


@lru_cache(maxsize=64)
def _wants_keys(template: ChatTemplate) -> bool:
    """True if the template leaves out reasoning in the content, or writes an empty thought before it."""
    mark = _mark(0)
    thought, text = _THOUGHT.format(mark), _ANSWER["content"]
    inside, behind = (
        _text(template, [_QUESTION, {**_ANSWER, "content": content}]) or mark
        for content in (thought + text, mark + _THOUGHT.format(text) + text)
    )
    return mark not in inside or (mark in behind and _EMPTY.search(behind.partition(mark)[0]) is not None)


@lru_cache(maxsize=64)
def _writes_tools(template: ChatTemplate) -> bool | None:
    """True if the template writes tools, whoever speaks last; also where it refuses the probes. None where it depends
    on the conversation (Dolphin's writes them only if the user speaks last)."""
    system = {"role": "system", "content": "c"}
    exchange = [_QUESTION, _ANSWER]
    texts = [_text(template, messages, [PROBE_TOOL]) for messages in ([_QUESTION], [system, _QUESTION], exchange)]
    written = {_TOOL_NAME in text for text in texts if text is not None}
    return True if not written else written.pop() if len(written) == 1 else None


@lru_cache(maxsize=64)
def _opens_empty(template: ChatTemplate) -> bool:
    """True if the generation prompt ends with an empty thought, so that no answer learns one."""
    try:
        return _EMPTY.search(template.render([_QUESTION], None, True).text) is not None
    except TemplateRefused:
        return False
