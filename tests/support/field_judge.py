"""An independent judge of trained rows: transformers' rendering, and what a model writes between its prompt and stop.

It shares nothing with the code under test. A turn is located by rendering the conversation again with the letters of
one message changed; it begins where the generation prompt of the earlier messages ends, and ends with the family's
first stop token after its text.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

from tests.support.field_tokenizers import CONTROL, Family

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")
# Reasoning within a content: Qwen's and DeepSeek's form, Mistral's, Cohere's, Kimi's and Seed's.
TAGS = {
    "<think>": "<think>\n{}\n</think>\n\n",
    "[THINK]": "[THINK]{}[/THINK]",
    "<|START_THINKING|>": "<|START_THINKING|>{}<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1think\u25b7{}\u25c1/think\u25b7",
    "<seed:think>": "<seed:think>{}</seed:think>",
}
A_PART = "a part of the content"  # Mistral's, of type "thinking"
# What neither the changing of letters nor the search for lost texts touches.
_KEPT = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z]+\])")
_THOUGHT_TAG = re.compile(
    r"</?(?:[a-z_:]*think\w*)>|\u25c1/?think\u25b7|\[/?THINK\]|<\|(?:START|END)_THINKING\|>|<\|?channel\|?>"
)
_EMPTY_THOUGHT = re.compile(r"<(\w*think)>\s*</\1>\s*|\[THINK\]\[/THINK\]|<\|START_THINKING\|><\|END_THINKING\|>")

MARKED_PROMPT = "mask: the template's marks begin inside the prompt, and so does the loss"


@dataclass(frozen=True)
class Expected:
    """Where one turn begins (between `low` and `high`, as a prompt may open it) and ends, in characters. end: None
    where the row holds no stop of it. past: another end that the template writes in earlier turns."""

    message: int
    low: int
    high: int
    end: int | None
    past: int | None = None


@dataclass
class Verdict:
    """What is wrong with a row, in short kinds with details, and notes on accepted differences."""

    wrong: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class TemplateJudge:
    def __init__(self, tokenizer: Any, family: Family) -> None:
        self.tokenizer, self.family = tokenizer, family
        self.has_marks = re.search(r"\{%-? *generation", tokenizer.chat_template) is not None

    # transformers' rendering.

    def render(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str | None:
        """The rendering; None if the template raises."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception:  # noqa: BLE001 (a template is a program, and raises what it likes)
            return None

    def error(self, messages: Sequence[Message], tools: Any) -> str:
        """The words with which the template raises; "" if it does not."""
        try:
            self.tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False)
        except Exception as error:  # noqa: BLE001
            return str(error) or type(error).__name__
        return ""

    def ids(self, text: str) -> list[int]:
        """Ids as `apply_chat_template(tokenize=True)` makes them of a rendering."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    # The row.

    def forms(self, messages: Sequence[Message], tools: Any) -> list[tuple[str, list[Message], str]]:
        """The forms of the messages that the template takes, as (name, messages, rendering): as given first."""
        found: dict[str, tuple[str, list[Message], str]] = {}
        tried = set()
        for name, form in _forms(messages):
            key = json.dumps(form)
            if key in tried or ("content as parts" in name and self._reads_texts):
                continue
            tried.add(key)
            text = self.render(form, tools)
            if text is not None:
                found.setdefault(text, (name, form, text))
        return list(found.values())

    @cached_property
    def _reads_texts(self) -> bool:
        """True if the template writes a content that is a text. Where it refuses or skips one, as an empty one, parts
        would only hide that from it."""
        return "probe" in (self.render([{"role": "user", "content": "probe"}], None) or "")

    @cached_property
    def _usual_stop(self) -> str:
        """The control token that the template writes behind an answer that a question follows; "" without one."""
        asked, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}
        _, _, rest = (self.render([asked, answer, asked], None) or "").partition("reply")
        found = CONTROL.match(rest.lstrip())
        return found.group() if found else ""

    def judge(self, messages: Sequence[Message], tools: Any, ids: list[int], mask: list[bool]) -> Verdict:
        """Compare a trained row with transformers' ids, with the turns, and with what the messages hold."""
        verdict = Verdict()
        answered = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        lengths = dict.fromkeys([len(messages), answered[-1] + 1])
        candidates = [
            (form, body, text)
            for length in lengths
            for form, body, plain in self.forms(messages[:length], tools)
            for text in self.texts(body, plain, tools)
        ]
        same = [(form, body, text) for form, body, text in candidates if self.ids(text) == ids]
        if not candidates:
            verdict.wrong.append(("ids: trained, though the template raises", self.error(messages, tools)))
            return verdict
        if not same:
            decoded = self.tokenizer.decode(ids)
            verdict.wrong.append(("ids differ from apply_chat_template", _difference(decoded, candidates, self, ids)))
            return verdict
        judged = []
        for form, body, text in same:
            one = Verdict()
            self._judge_mask(body, tools, text, mask, one)
            one.wrong += [(f"lost: {what}", detail) for what, detail in self.lost(body, tools, text)]
            one.wrong += [(f"form: {what}", detail) for what, detail in self.misread(body, tools, text)]
            if form != "as given":
                one.notes.append(form)
            judged.append(one)
        return min(judged, key=lambda one: len(one.wrong))

    def texts(self, body: Sequence[Message], plain: str, tools: Any) -> Iterator[str]:
        """The rendering; the same with the answer behind its whole prompt; each with the next speaker's token, if that
        is what stops the model."""
        texts = [plain]
        if body[-1]["role"] == "assistant":
            asked = self.render(body[:-1], tools, prompt=True) if len(body) > 1 else None
            if asked is not None and not plain.startswith(asked):
                same = len(os.path.commonprefix([asked, plain]))
                cuts = [same, *(m.start() for m in _THOUGHT_TAG.finditer(asked) if m.start() < same)]
                texts += [asked + plain[cut:] for cut in cuts if not _THOUGHT_TAG.sub("", asked[cut:]).strip()]
        for text in texts:
            yield text
            yield from (text + stop for stop in self.next_stops(body, plain, tools))

    def next_stops(self, body: Sequence[Message], plain: str, tools: Any) -> list[str]:
        """Stop tokens that the template writes behind the last turn only once another message follows."""
        if body[-1]["role"] != "assistant" or any(plain.rstrip().endswith(stop) for stop in self.family.stops):
            return []
        follows = {"role": "user", "content": "And then?"}
        if calls := body[-1].get("tool_calls"):
            follows = {"role": "tool", "name": calls[0]["function"]["name"], "content": "a result"}
        longer = self.render([*body, follows], tools) or ""
        until = longer.rfind(follows["content"])
        for size in (20, 10, 5, 2):  # thoughts before the answer may vanish once a message follows
            last = plain.rstrip()[-size:]
            at = longer.rfind(last, 0, max(until, 0))
            if at >= 0:
                rest = longer[at + len(last) :].lstrip()
                opening = CONTROL.match(rest)
                stops = [stop for stop in self.family.stops if rest.startswith(stop)]
                if not stops and opening and opening.group() not in self._header((), tools, None):
                    stops = [opening.group()]  # of the next speaker's, with which no answer begins
                return stops
        return []

    def lost(self, body: Sequence[Message], tools: Any, text: str) -> Iterator[tuple[str, str]]:
        """What messages hold and their rendering lacks, as (kind, detail). A call is written if another one would
        change the rendering: tools in a system prompt hold the same names."""
        yield from _lost_texts(body, tools, text)
        plain = self.render(body, tools)
        for place, message in enumerate(body):
            calls = message.get("tool_calls") or []
            for number, call in enumerate(calls):
                for what, detail, other in _other_calls(call):
                    changed = {**message, "tool_calls": [*calls[:number], other, *calls[number + 1 :]]}
                    if self.render([*body[:place], changed, *body[place + 1 :]], tools) == plain:
                        yield what, f"message {place + 1}: {detail}"
                        break

    def misread(self, body: Sequence[Message], tools: Any, text: str) -> Iterator[tuple[str, str]]:
        """Signs that the template wanted another form: arguments quoted twice or as Python writes them, the word null
        in place of a content, and an empty thought before the one that is given."""
        for turn in self.turns(body, tools, text):
            calls = body[turn.message].get("tool_calls") or []
            written = text[turn.high : turn.end]
            before = [text[turn.low : turn.end].partition(thought) for thought in _thoughts_of(body[turn.message])]
            if any(thought and _EMPTY_THOUGHT.search(start) for start, thought, _ in before):
                yield "a thought stands behind an empty one", f"message {turn.message + 1}: {written[:60]!r}"
            if calls and not body[turn.message].get("content") and re.match(r"\s*(None|null|undefined)\b", written):
                yield "null is written as the content", f"message {turn.message + 1}: {written[:60]!r}"
            for value in map(_arguments, calls):
                if any(f'\\"{key}\\"' in written for key in value):
                    yield "arguments are quoted twice", f"message {turn.message + 1}: {written[:200]!r}"
                elif value and repr(value) in written and repr(value) != json.dumps(value):
                    yield "arguments are written as Python's repr", f"message {turn.message + 1}: {written[:200]!r}"

    # The mask.

    def _judge_mask(self, body: Sequence[Message], tools: Any, text: str, mask: list[bool], verdict: Verdict) -> None:
        turns = self.turns(body, tools, text)
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        named = "message {}"
        for turn in turns:
            if turn.end is None and turn.past is None:
                verdict.wrong.append(("mask: a turn without its stop is trained", named.format(turn.message + 1)))
        allowed: list[set[bool]] = [{False} for _ in offsets]
        for turn in turns:
            inside = [
                mask[n]
                for n, (begin, end) in enumerate(offsets)
                if turn.high <= begin < end <= (turn.end or turn.past or 0)
            ]
            if not any(inside) and self._had_thoughts(body, turn.message):
                verdict.wrong.append(("lost: an earlier answer carries no loss", named.format(turn.message + 1)))
                continue
            ends = [end for end in (turn.end, turn.past) if end is not None] or [len(text)]
            for place, (begin, end) in enumerate(offsets):
                if begin == end or end <= turn.low or begin >= max(ends):
                    continue
                sure = begin >= turn.high and end <= min(ends)
                allowed[place] = {True} if sure else {True, False}
        for place, can in enumerate(allowed):
            if place and mask[place] not in can:
                begin, end = offsets[place]
                if self.has_marks and can == {False} and self._is_prompt(text, begin, turns):
                    verdict.wrong.append((MARKED_PROMPT, f"{text[begin : begin + 60]!r}"))
                    return
                what = "misses" if can == {True} else "is on"
                around = f"{text[max(0, begin - 30) : begin]!r} [{text[begin:end]!r}] {text[end : end + 30]!r}"
                verdict.wrong.append((f"mask: the loss {what} {self._kind(text, begin, end, turns)}", around))
                return

    @staticmethod
    def _had_thoughts(body: Sequence[Message], place: int) -> bool:
        """True for an answer with reasoning before the last one: a template may write it without."""
        message = body[place]
        written = isinstance(message.get("content"), str) and any(tag in message["content"] for tag in TAGS)
        return place < len(body) - 1 and (written or any(message.get(key) for key in REASONING))

    @staticmethod
    def _is_prompt(text: str, begin: int, turns: Sequence[Expected]) -> bool:
        """True if a character belongs to the few with which a prompt ends."""
        return any(turn.low - 40 < begin < turn.low and "\n\n" not in text[begin : turn.low].strip() for turn in turns)

    def _kind(self, text: str, begin: int, end: int, turns: Sequence[Expected]) -> str:
        """The part of a row that a character is in, in words."""
        for turn in turns:
            last = turn.end or turn.past or len(text)
            if turn.low <= begin and end <= last:
                return "a turn's stop" if end == last else "part of a turn"
        for turn in turns:
            last = turn.end or turn.past or len(text)
            if end <= turn.low and not text[end : turn.low].strip():
                return "the end of a prompt"
            if last <= begin < last + 40:
                return f"what follows a turn ({text[begin:end]!r})"
        return "other text"

    def turns(self, body: Sequence[Message], tools: Any, text: str) -> list[Expected]:
        """The turns of the assistant in a rendering, or in one with a prompt or stop added (`texts`)."""
        plain = self.render(body, tools)
        assert plain is not None
        shared = len(os.path.commonprefix([plain, text]))
        added = len(text) - len(plain)
        regions = self._regions(body, tools, plain)
        found = []
        at = 0
        for place, message in enumerate(body):
            if message["role"] != "assistant":
                at = max(at, regions[place][1])
                continue
            first, last = regions[place]
            following = min((regions[n][0] for n in range(place + 1, len(body))), default=len(text))
            low, high = self._begin(body, tools, plain, place, (at, first))
            is_last = place == len(body) - 1
            if is_last and shared < len(plain):  # the answer stands behind its whole prompt
                asked = self.render(body[:place], tools, prompt=True)
                low = high = len(asked or "")
                last, following = last + added, len(text)
            elif is_last:
                following = len(text)
            last = max(last, high)  # a turn may hold no text
            end = self._stop(text, last, following, self.family.stops)
            past = None if is_last else self._stop(text, last, following, self.family.past)
            if past is not None and end is not None and end > past and not is_last:
                end = None
            if end is None and is_last and text.startswith(plain) and self.next_stops(body, plain, tools):
                end = len(text)
            if end is None and past is None and not is_last:
                end = self._opening_behind(body, tools, plain, (place, last, following))
            found.append(Expected(place, low, high, end, past))
            at = last
        return found

    def _opening_behind(
        self, body: Sequence[Message], tools: Any, plain: str, turn: tuple[int, int, int]
    ) -> int | None:
        """The end of the control token that begins what follows a turn, where the template writes no stop of the
        family's behind it, as behind a single call of DeepSeek R1's: the model can only stop there."""
        place, last, following = turn
        own = self.render(body[: place + 1], tools) or ""
        close = len(os.path.commonprefix([own, plain]))
        if close != len(own) or close < last:
            return None
        found = CONTROL.match(plain, close + len(plain[close:]) - len(plain[close:].lstrip()), following)
        if found and not body[place].get("tool_calls") and found.group() != self._usual_stop:
            return None  # Seed-OSS's empty answers: without the stop of others
        return found.end() if found else None

    def _regions(self, body: Sequence[Message], tools: Any, plain: str) -> list[tuple[int, int]]:
        """For each message, the characters of the rendering from the first to the last that its texts decide."""
        regions = []
        at = 0
        for place, message in enumerate(body):
            changed = [*body[:place], _changed(message), *body[place + 1 :]]
            other = self.render(changed, tools)
            if other is None or other == plain:
                regions.append((at, at))
                continue
            first = len(os.path.commonprefix([plain, other]))
            tail = len(os.path.commonprefix([plain[first:][::-1], other[first:][::-1]]))
            at = max(at, len(plain) - tail)
            regions.append((first, len(plain) - tail))
        return regions

    def _begin(
        self, body: Sequence[Message], tools: Any, plain: str, place: int, within: tuple[int, int]
    ) -> tuple[int, int]:
        asked = self.render(body[:place], tools, prompt=True) if place else None
        start, first = within
        if asked is not None and asked == self.render(body[:place], tools) and plain.startswith(asked):
            return len(asked), first  # a template that writes no prompt: a header may be given in its place
        if asked is not None and plain.startswith(asked):
            # Gemma 4's templates ask for nothing behind a tool's answer, and write a header there.
            usual = self._header((), tools, None)
            written = (usual[cut:] for cut in range(len(usual) - 3) if plain.startswith(usual[cut:], len(asked)))
            return len(asked), len(asked) + len(next(written, ""))
        header = self._header(body[:place], tools, asked)
        base = _THOUGHT_TAG.split(header)[0]
        if place == 0 and not any(base[cut:] in plain[:first] for cut in range(max(1, len(base) - 5))):
            # Nobody asks: behind the template's own system prompt.
            return max((match.end() for match in CONTROL.finditer(plain, 0, first)), default=start), first
        tags = [match.span() for match in _KEPT.finditer(header)]
        thought = _THOUGHT_TAG.search(header)
        base = thought.start() if thought else len(header)
        for size in range(len(header), 0, -1):
            if any(low < size < high for low, high in tags) or header[size - 1 : size + 1].isalnum():
                continue
            at = plain.rfind(header[:size], start, max(first, start + size))
            if at >= 0:
                low = at + min(base, size)
                high = max(low, min(at + size, first))
                # A template may write an empty thought that another prompt of its would hold.
                empty = _EMPTY_THOUGHT.match(plain, low, max(first, low))
                high = max(high, empty.end() if empty else 0)
                # Or no more than the tag with which that prompt's empty thought ends.
                closed = _THOUGHT_TAG.match(plain, high, max(first, high))
                begin = low, closed.end() if closed and header.endswith(closed.group()) else high
                break
        else:
            begin = start, first
        # What stands between the earlier texts and the header may be elsewhere in the whole, as tools are.
        for cut in range(1, len(header) - 5):
            if any(low < cut < high for low, high in tags) or _THOUGHT_TAG.search(header, cut):
                continue
            at = plain.rfind(header[cut:], begin[1], first)
            if at >= 0:
                return at + len(header) - cut, at + len(header) - cut
        return begin

    def unasked(self, body: Sequence[Message], tools: Any, plain: str) -> list[int]:
        """Messages of the assistant before which a rendering lacks the header of the prompt that would ask for them, as
        before Falcon 3's calls: a model would never be asked so."""
        regions = self._regions(body, tools, plain)
        found = []
        for place, message in enumerate(body):
            if message["role"] != "assistant" or place == 0:
                continue
            header = self._header(body[:place], tools, self.render(body[:place], tools, prompt=True))
            header = _THOUGHT_TAG.split(header)[0].strip()
            begin = max(end for _, end in regions[:place])
            if header not in plain[begin : max(regions[place][0], begin + len(header) + 2)]:
                found.append(place)
        return found

    def _header(self, earlier: Sequence[Message], tools: Any, asked: str | None) -> str:
        """What the template writes between the texts of the earlier messages and an answer."""
        if asked is None or not earlier:
            earlier = [{"role": "user", "content": "A question?"}]
            asked = self.render(earlier, tools, prompt=True) or ""
        other = self.render([*earlier[:-1], _changed(earlier[-1])], tools, prompt=True) or ""
        return asked[len(asked) - len(os.path.commonprefix([asked[::-1], other[::-1]])) :] if asked != other else ""

    @staticmethod
    def _stop(text: str, begin: int, limit: int, stops: Sequence[str]) -> int | None:
        ends = [at + len(stop) for stop in stops if (at := text.find(stop, begin, limit)) >= 0]
        return min(ends, default=None)


# Forms of messages.


def _forms(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """The messages in the forms that templates read, the closest first."""
    contents = ("as given", "content ''", "content null", "no content")
    for parts, content, arguments, key in product(
        (False, True), contents, ("as given", "object", "text"), ("as given", *REASONING, *TAGS, A_PART)
    ):
        form = [_formed(message, parts, content, (arguments, key)) for message in messages]
        names = [f"arguments as {arguments}"] * (arguments != "as given") + [content] * (content != "as given")
        names += ["content as parts"] * parts + [f"reasoning as {key}"] * (key != "as given")
        yield ", ".join(names) or "as given", form


def _formed(message: Message, parts: bool, content: str, others: tuple[str, str]) -> Message:
    arguments, key = others
    made = {name: value for name, value in message.items() if value is not None or name == "content"}
    if isinstance(made.get("content"), list) and not parts:
        made["content"] = "".join(part["text"] for part in made["content"] if "text" in part)
    if key != "as given" and made["role"] == "assistant":
        made = _with_thought(made, key)
    if made.get("tool_calls") and not made.get("content") and content != "as given":
        made["content"] = {"content ''": "", "content null": None}.get(content)
        if content == "no content":
            del made["content"]
    if parts and isinstance(made.get("content"), str):
        made["content"] = [{"type": "text", "text": made["content"]}]
    if made.get("tool_calls") and arguments != "as given":
        calls, as_text = made["tool_calls"], arguments == "text"
        made["tool_calls"] = [_with_arguments(call, _arguments(call), as_text=as_text) for call in calls]
    return made


def _with_thought(message: Message, key: str) -> Message:
    """The message with its reasoning elsewhere, also if it is at the beginning of its content."""
    made = {name: value for name, value in message.items() if name not in REASONING}
    content = made.get("content") or ""
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    if thought is None and isinstance(content, str) and content.startswith("<think>"):
        thought, _, content = content.removeprefix("<think>").partition("</think>")
        thought, content = thought.strip(), content.lstrip("\n")
    if thought is None or not isinstance(content, str):
        return message
    if key in TAGS:
        return {**made, "content": TAGS[key].replace("{}", thought) + content}
    if key == A_PART:
        parts = [{"type": "text", "text": content}] if content else []
        return {**made, "content": [{"type": "thinking", "thinking": thought}, *parts]}
    return {**made, "content": content, key: thought}


def _arguments(call: dict[str, Any]) -> Any:
    given = call["function"]["arguments"]
    return json.loads(given) if isinstance(given, str) else given


def _with_arguments(call: dict[str, Any], value: Any, *, as_text: bool) -> dict[str, Any]:
    written = json.dumps(value, ensure_ascii=False) if as_text else value
    return {**call, "function": {**call["function"], "arguments": written}}


def _in_text(call: dict[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], str)


# A message with other letters.


def _changed(message: Message) -> Message:
    """The message with other letters and figures in all its texts, so that a rendering differs where they are."""
    made = dict(message)
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = [
            {**part, **{name: _other(part[name]) or "X" for name in ("text", "thinking") if name in part}}
            for part in content
        ]
    elif content:
        made["content"] = _other(content) if _other(content) != content else f"X{content}"
    elif not made.get("tool_calls") and not any(made.get(key) for key in REASONING):
        made["content"] = "X"
    for key in REASONING:
        if made.get(key):
            made[key] = _other(made[key])
    if made.get("tool_calls"):
        made["tool_calls"] = [_other_call(call) for call in made["tool_calls"]]
    return made


def _other(text: str) -> str:
    return "".join(
        part if number % 2 else re.sub(r"\d", _figure, codecs.encode(part, "rot13"))
        for number, part in enumerate(_KEPT.split(text))
    )


def _figure(match: re.Match[str]) -> str:
    return str((int(match[0]) + 5) % 10) if match[0].isascii() else match[0]


def _other_call(call: dict[str, Any]) -> dict[str, Any]:
    changed = _other_value(_arguments(call)) or {"z": "z"}
    if changed == _arguments(call):
        changed = {**changed, "z": "z"}
    return _with_arguments(call, changed, as_text=_in_text(call))


def _other_value(value: Any) -> Any:
    if isinstance(value, str):
        return _other(value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 5
    if isinstance(value, list):
        return [_other_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _other_value(item) for key, item in value.items()}
    return value


# What a rendering lacks.


def _lost_texts(messages: Sequence[Message], tools: Any, text: str) -> Iterator[tuple[str, str]]:
    """What the messages hold besides calls and the text lacks, as (kind, detail). Thoughts of turns before the last
    answer may be missing: templates leave them out of later prompts, too."""
    last_answer = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    for place, message in enumerate(messages):
        for leaf in _texts_of(message.get("content")):
            for thought, part in _split_thought(leaf, message["role"]):
                kind = "a thought in the content" if thought else f"content of {message['role']}"
                kind = "text beside a call" if message.get("tool_calls") and not thought else kind
                if not _holds(text, part) and not (thought and place < last_answer):
                    yield kind, f"message {place + 1}: {part[:60]!r}"
        for key in REASONING:
            if message.get(key) and place == last_answer and not _holds(text, message[key]):
                yield f"reasoning ({key})", f"message {place + 1}: {message[key][:60]!r}"
    for tool in tools or ():
        function = tool["function"]
        for leaf in [function["name"], function["description"], *function["parameters"].get("properties", {})]:
            if not _holds(text, leaf):
                yield "tools", f"{leaf!r}"
                return


def _other_calls(call: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Calls that differ from this one in its name or in one of its arguments, as (kind, detail, call)."""
    function = call["function"]
    yield "a call", function["name"], {**call, "function": {**function, "name": f"other_{function['name']}"}}
    value = _arguments(call)
    for key, item in value.items():
        changed = _other_value(item) if item is not None else "z"
        renamed = {f"z_{name}" if name == key else name: each for name, each in value.items()}
        for other in ({**value, key: changed}, renamed):
            yield "an argument", f"{key}: {item!r}", _with_arguments(call, other, as_text=_in_text(call))


def _texts_of(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        value = (part.get("text") or part.get("thinking")) if isinstance(part, dict) else part
        if isinstance(value, str):
            yield value


def _split_thought(text: str, role: str) -> Iterator[tuple[bool, str]]:
    if role == "assistant" and "</think>" in text:
        thought, _, rest = text.partition("</think>")
        yield True, thought.replace("<think>", "")
        yield False, rest
    else:
        yield False, text


def _thoughts_of(message: Message) -> Iterator[str]:
    """The thoughts of a message, under a key or in its content."""
    yield from (message[key].strip() for key in REASONING if message.get(key))
    for text in _texts_of(message.get("content")):
        for begin, end in (form.split("{}") for form in TAGS.values()):
            _, opened, rest = text.partition(begin.strip())
            if thought := opened and rest.partition(end.strip())[0].strip():
                yield thought


def _holds(text: str, leaf: str) -> bool:
    """True if the text holds another, as it is, or as JSON or Python write it."""
    bare = leaf.strip()
    forms = [bare, repr(bare)[1:-1], *(json.dumps(bare, ensure_ascii=plain)[1:-1] for plain in (True, False))]
    forms += [forms[2].replace('\\"', '\\\\"'), json.dumps(forms[3])[1:-1], json.dumps(forms[2])[1:-1]]
    return any(form in text for form in forms)


def _difference(decoded: str, candidates: Sequence[tuple[str, Any, str]], judge: TemplateJudge, ids: list[int]) -> str:
    """The first difference between a row and the closest candidate."""
    shared = partial(_shared, decoded)
    form, _, text = max(candidates, key=lambda each: shared(each[2]))
    at = shared(text)
    if at == len(text) == len(decoded):
        theirs = judge.ids(text)
        place = len(os.path.commonprefix([theirs, ids]))
        names = judge.tokenizer.convert_ids_to_tokens
        ours, other = names(ids[place : place + 6]), names(theirs[place : place + 6])
        return f"same text, other tokens at {place}: {ours} for {other}"
    low = max(0, at - 40)
    return f"{form}: row has {decoded[low : at + 60]!r}, transformers has {text[low : at + 60]!r}"


def _shared(first: str, second: str) -> int:
    return len(os.path.commonprefix([first, second]))
