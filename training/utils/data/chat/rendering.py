"""A chat template applied to messages, and applied to messages whose texts are masked.

Masked means: every character of a message is replaced by a private-use character that stands for this character of this
text. Then the unmasked output was written by the template: a header or an end-of-turn token that a message quotes
cannot be mistaken for the template's.

A template comes with a model, and is a program: Jinja's sandbox keeps it from the machine, and lets it loop for years
or multiply a text to gigabytes. Its first renderings happen in a separate process with limits; later ones, of other
rows, are ended if they take too long. Knows nothing of turns, tokens or phases.

In shapes: C characters of a rendering, M of them masked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.data.formats.messages import REASONING_KEYS, BadConversation, Message

# The private-use planes 15 and 16, without the last two code points of each plane, which are not characters.
_FIRST_MASK, _LAST_MASK = 0xF0000, 0x10FFFD
# Masking should not change what a template does with a text: blanks stay, so that trimming trims the same, and
# characters that JSON escapes stay, so that `tojson` writes the same length.
_ESCAPED = frozenset('"\\')
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Methods by which a template inspects a text. Literals that it looks for must not be masked.
_INSPECTING_METHODS = frozenset(
    "startswith endswith split rsplit partition rpartition splitlines find rfind index rindex count replace "
    "strip lstrip rstrip removeprefix removesuffix".split()
)


# A call, its tool and its answer, in conversations that probe a template.
PROBE_CALL: Message = {
    "id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"key": "d"}},
}  # fmt: skip
_KEY = {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}, "required": ["key"]}
PROBE_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": _KEY}}
PROBE_CALLED: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
    {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": "e"},
)
_QUESTION, _ANSWER = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}
_SYSTEM = {"role": "system", "content": "a system prompt"}
_TRIALS: tuple[tuple[list[Message], Any], ...] = (
    ([_QUESTION], None),
    ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION, _ANSWER], None),
    ([*PROBE_CALLED, _ANSWER], [PROBE_TOOL]),
)
_tried: set[str] = set()  # texts of templates that stay within the bounds below in this process


@dataclass(frozen=True)
class Rendering:
    """A template's output. `marks`: (begin, end) characters of its `{% generation %}` blocks, in order."""

    text: str
    marks: list[tuple[int, int]]


class TemplateRefused(Exception):
    """The template raised; carries its message."""


class ChatTemplate:
    """One Jinja chat template with its variables besides messages and tools."""

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        """variables: special tokens by name, and --chat_template_kwargs. Raises ThreestepError for invalid Jinja."""
        self.text = text
        self.has_marks = _MARK.search(text) is not None
        self._variables = dict(variables)
        self.eos_token = str(variables.get("eos_token") or "")
        self.literals, self.names = _literals_and_names(text)
        if text not in _tried:
            check_first_renderings(self._try_out)
            _tried.add(text)

    def _try_out(self) -> None:
        """Render short conversations, with and without a generation prompt and tools."""
        for messages, tools in _TRIALS:
            for generation_prompt in (False, True):
                with contextlib.suppress(TemplateRefused):
                    self.render(messages, tools, generation_prompt)

    @cached_property
    def _reads_only_parts(self) -> bool:
        """Return whether the template writes texts that are parts of a content and not one that is the content, as
        those of some models that read more than text do."""
        probe = "a probe"
        for content in (probe, [{"type": "text", "text": probe}]):
            try:
                if probe in self._written([{"role": "user", "content": content}]).text:
                    return content != probe
            except TemplateRefused:
                continue
        return False

    def render(
        self, messages: Sequence[Message], tools: Any = None, generation_prompt: bool = False, marks: bool = False
    ) -> Rendering:
        """Apply the template as transformers does; raises TemplateRefused where it raises. A template that reads only
        parts gets each text as one."""
        return self._written([self._as_read(message) for message in messages], tools, generation_prompt, marks)

    def _written(
        self, messages: Sequence[Message], tools: Any = None, generation_prompt: bool = False, marks: bool = False
    ) -> Rendering:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = f"a conversation of {len(messages)} messages"
        try:
            with limited_rendering(conversation):
                rendered: Any = render_jinja_template(
                    conversations=[list(messages)],
                    tools=tools,
                    chat_template=self.text,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=generation_prompt,
                    **self._variables,
                )
        except ThreestepError:
            raise
        # A template operates on whatever the messages hold, so it can raise nearly any Python error.
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateRefused(str(error).strip() or type(error).__name__) from error
        (text,), found = rendered
        if len(text) > MOST_CHARACTERS:
            raise ThreestepError(
                f"the chat template produces {len(text):,} characters for {conversation}, more than "
                f"{MOST_CHARACTERS:,}; fix its loops, or use another one with --chat_template"
            )
        return Rendering(text, [(begin, end) for begin, end in found[0]] if marks else [])

    def _as_read(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str) or not self._reads_only_parts:
            return message
        return {**message, "content": [{"type": "text", "text": content}]}


def _literals_and_names(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The string literals that a template looks for ("</think>" in `'</think>' in content`), and all names in it."""
    import jinja2
    from jinja2 import ext, nodes

    class Marks(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        tree = jinja2.Environment(extensions=[Marks, ext.loopcontrols]).parse(template)  # noqa: S701 (text for a model, not a page)
    except jinja2.TemplateSyntaxError as error:
        raise ThreestepError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
    looked_at: list[nodes.Node] = [compare for compare in tree.find_all(nodes.Compare) if not _is_role(compare.expr)]
    for test in [*tree.find_all(nodes.Filter), *tree.find_all(nodes.Test)]:
        looked_at += test.args
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _INSPECTING_METHODS:
            looked_at += call.args
    constants = [node for top in looked_at for node in (top, *top.find_all(nodes.Const))]
    literals = (node.value for node in constants if isinstance(node, nodes.Const))
    names = frozenset(node.name for node in tree.find_all(nodes.Name))
    return frozenset(literal for literal in literals if isinstance(literal, str) and literal.strip()), names


def _is_role(node: Any) -> bool:
    """`message.role` or `message['role']`, which is compared with roles, not with texts."""
    return getattr(node, "attr", None) == "role" or getattr(getattr(node, "arg", None), "value", None) == "role"


# Bounds on a template: its time, its memory and the length of its output.

TRIAL_SECONDS = 10  # of the processor, for three short conversations; a real template takes milliseconds
_WAITING = 3  # times as long by the clock, on a machine that others use
MOST_BYTES = 1 << 30  # more than the process has when it begins
MOST_CHARACTERS = 1 << 26  # of one rendering
RENDERING_SECONDS = 60.0  # of any later one, by the clock
_OUT_OF_MEMORY, _TOO_LONG = 3, 4  # exit codes of the trial
_watched_process = 0
_deadlines: dict[int, float] = {}  # of threads that render
_lock = threading.Lock()


class _TooSlow(Exception):
    """Raised in a thread whose rendering takes too long."""


def check_first_renderings(render: Callable[[], None]) -> None:
    """Call `render` in a forked process. ThreestepError if that takes too much time or memory, or writes too much.
    Its other exceptions are not handled here."""
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that another thread holds; the child renders, and takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _try_out(render)
    deadline = time.monotonic() + _WAITING * TRIAL_SECONDS
    while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(waited[1])
    if code == _OUT_OF_MEMORY:
        raise ThreestepError(_refused(f"takes more than {MOST_BYTES >> 20} MiB of memory"))
    if code == _TOO_LONG:
        raise ThreestepError(_refused(f"produces more than {MOST_CHARACTERS:,} characters"))
    if code < 0:
        raise ThreestepError(_refused(f"takes more than {TRIAL_SECONDS} seconds"))


def _try_out(render: Callable[[], None]) -> None:
    """Render within limits and end the process, without anything that a Python program does at its end."""
    code = 1
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_SECONDS, TRIAL_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        render()
        code = 0
    except ThreestepError:
        code = _TOO_LONG
    except (MemoryError, OverflowError):
        code = _OUT_OF_MEMORY
    finally:
        os._exit(code)


@contextlib.contextmanager
def limited_rendering(conversation: str) -> Iterator[None]:
    """Inside, ThreestepError after `RENDERING_SECONDS`. conversation: the rendered one, in words. One step of a
    template that Python cannot interrupt is not ended."""
    thread = threading.get_ident()
    _watch()
    with _lock:
        _deadlines[thread] = time.monotonic() + RENDERING_SECONDS
    try:
        yield
    except _TooSlow:
        raise ThreestepError(
            f"the chat template takes more than {RENDERING_SECONDS:g} seconds for {conversation}; fix its loops, or "
            "use another one with --chat_template"
        ) from None
    finally:
        with _lock:
            if _deadlines.pop(thread, None) is None:  # it came too late, and may still be pending
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def _watch() -> None:
    """Start the thread that looks at deadlines, once in each process."""
    global _watched_process
    with _lock:
        if _watched_process == os.getpid():
            return
        _watched_process = os.getpid()
        _deadlines.clear()  # of the process that this one is a fork of
    threading.Thread(target=_end_late_ones, name="deadlines of renderings", daemon=True).start()


def _end_late_ones() -> None:
    while True:
        time.sleep(min(1.0, RENDERING_SECONDS / 4))
        now = time.monotonic()
        with _lock:
            for thread in [thread for thread, deadline in _deadlines.items() if now > deadline]:
                del _deadlines[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooSlow))


def _refused(what: str) -> str:
    return f"the chat template {what} for three short conversations; use another one with --chat_template"


# Masks.


@dataclass(frozen=True)
class MessageText:
    """One text of a message.

    message: index of the message.
    kind: "content", "reasoning" or "call" (tool arguments).
    masked: whether any character is masked (none where the text is blank).
    """

    message: int
    kind: str
    text: str
    masked: bool


@dataclass
class MaskedMessages:
    """Messages with their texts masked, and the meaning of each mask.

    Mask n is the character `_FIRST_MASK` + n, for the code point `originals[n]`. Text t owns the masks from `begins[t]`
    to before `begins[t + 1]`.
    """

    messages: list[Message] = field(default_factory=list)
    texts: list[MessageText] = field(default_factory=list)
    originals: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)

    def provenance(self, masked: str, plain: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The masked characters of a rendering: their positions, ascending, the texts and the messages that they are
        of; all int64 [M]. None if the template treated `masked` and `plain` differently."""
        if len(masked) != len(plain):
            return None
        masked_C, plain_C = _code_points(masked), _code_points(plain)
        positions_M = np.flatnonzero(masked_C >= _FIRST_MASK)
        masks_M = masked_C[positions_M] - _FIRST_MASK
        if len(masks_M) and int(masks_M.max()) >= len(self.originals):
            return None  # the template, or an unmasked text, contains private-use characters
        masked_C[positions_M] = np.array(self.originals, np.uint32)[masks_M]
        if not np.array_equal(masked_C, plain_C):
            return None
        texts_M = np.searchsorted(np.array(self.begins, np.int64), masks_M, side="right") - 1
        messages_M = np.array([text.message for text in self.texts], np.int64)[texts_M]
        return positions_M, texts_M, messages_M


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).copy()


def mask_messages(
    messages: Sequence[Message], where: str, unmasked: Iterable[str] = (), arguments: bool = True
) -> MaskedMessages:
    """Mask all texts (of tool arguments with `arguments`), but not roles, names, types and substrings `unmasked`."""
    masked = MaskedMessages()
    longest_first = sorted(unmasked, key=len, reverse=True)
    keep = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
    for place, message in enumerate(messages):
        copy = dict(message)
        mask = partial(_mask, masked=masked, keep=keep, where=where, place=place)
        if isinstance(copy["content"], str):
            copy["content"] = mask("content", copy["content"])
        elif copy["content"] is not None:
            copy["content"] = [_mask_part(part, mask) for part in copy["content"]]
        for key in REASONING_KEYS:
            if key in copy:
                copy[key] = mask("reasoning", copy[key])
        if arguments and "tool_calls" in copy:
            copy["tool_calls"] = [_mask_call(call, partial(mask, "call")) for call in copy["tool_calls"]]
        masked.messages.append(copy)
    return masked


def _mask_part(part: dict[str, Any], mask: Any) -> dict[str, Any]:
    kinds = {"text": "content", "thinking": "reasoning"}
    return {**part, **{key: mask(kind, part[key]) for key, kind in kinds.items() if key in part}}


def _mask_call(call: dict[str, Any], mask: Any) -> dict[str, Any]:
    call = dict(call)
    if isinstance(call.get("function"), dict):
        call["function"] = _mask_call(call["function"], mask)
    if "arguments" in call:
        call["arguments"] = _mask_values(call["arguments"], mask)
    return call


def _mask_values(value: Any, mask: Any) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list):
        return [_mask_values(item, mask) for item in value]
    if isinstance(value, dict):
        return {key: _mask_values(item, mask) for key, item in value.items()}
    return value


def _mask(kind: str, text: str, *, masked: MaskedMessages, keep: re.Pattern[str] | None, where: str, place: int) -> str:
    """The masked text, which is also noted in `masked`."""
    begin = len(masked.originals)
    characters = [c for c in sorted(set(text)) if not (c.isspace() or c in _ESCAPED or c < " ")]
    table = {ord(character): _FIRST_MASK + begin + number for number, character in enumerate(characters)}
    if begin + len(table) > _LAST_MASK - _FIRST_MASK:
        raise BadConversation(f"{where}: the conversation is too long to mask (over {len(masked.texts):,} texts)")
    if keep is None:
        hidden = text.translate(table)
    else:  # split at a group: masked and unmasked pieces alternate
        pieces = keep.split(text)
        hidden = "".join(piece if odd % 2 else piece.translate(table) for odd, piece in enumerate(pieces))
    masked.begins.append(begin)
    masked.originals.extend(ord(character) for character in characters)
    masked.texts.append(MessageText(place, kind, text, max(hidden, default="") >= chr(_FIRST_MASK)))
    return hidden
