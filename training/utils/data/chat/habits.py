"""The text that a chat template writes around messages, learnt from a conversation of single letters.

Serves `spans`: where headers end, what opens a message and what ends a turn. Knows nothing of real conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from training.utils.base.errors import ThreestepError
from training.utils.data.chat.rendering import ChatTemplate, MaskedMessages, TemplateRefused, mask_messages


@dataclass(frozen=True)
class TemplateHabits:
    """The text that one template writes around messages.

    special: matches the tokenizer's special tokens; None where it has none.
    ends: tokens that end an answer; the first one ends the last turn of a conversation.
    headers: what the generation prompt adds, and those beginnings of it that precede an assistant's text where that
        is not the whole (a thought that the generation prompt opens), longest first.
    missing_prompt: the header of a template that writes one before an assistant's text and ignores
        add_generation_prompt.
    always_asks: the generation prompt ends every conversation, also without add_generation_prompt (Cohere's templates
        with tools).
    asking: special tokens before an assistant's text, without the one that ends the message before.
    openings: special tokens that begin a message, and so never end one.
    is_open: the template ends no answer: the token with which the next message begins does (GLM 4.5's), and `ends[0]`
        has to be added to the last one.
    """

    special: re.Pattern[str] | None
    ends: tuple[str, ...]
    headers: tuple[str, ...] = ()
    missing_prompt: str = ""
    always_asks: bool = False
    asking: frozenset[str] = frozenset()
    openings: frozenset[str] = frozenset()
    is_open: bool = False

    def specials(self, text: str, begin: int, limit: int | None = None) -> Iterator[re.Match[str]]:
        """The special tokens between `begin` and `limit`."""
        return self.special.finditer(text, begin, len(text) if limit is None else limit) if self.special else iter(())

    def ending(self, text: str, begin: int = 0, limit: int | None = None) -> re.Match[str] | None:
        """The first special token between `begin` and `limit`, unless it begins a message."""
        match = next(self.specials(text, begin, limit), None)
        return match if match and match.group() not in self.openings else None

    def following(self, text: str, begin: int = 0) -> re.Match[str] | None:
        """The special token that stands at `begin`, or behind blanks there."""
        match = next(self.specials(text, begin), None)
        return match if match and not text[begin : match.start()].strip() else None

    def next_speaker(self, text: str) -> re.Match[str] | None:
        """The special token with which another speaker's message begins behind an answer; None where answers begin
        with it, too (<|im_start|>): it does not tell who speaks."""
        match = self.following(text)
        return match if match and match.group() not in self.asking else None


def learn_habits(
    template: ChatTemplate, special_tokens: Sequence[str], end_token: str | None, added_tokens: Sequence[str] = ()
) -> TemplateHabits:
    """Learn them from user a, assistant b, user c, assistant d. end_token: ends a turn, where the user names it.
    added_tokens: among which the one that ends a turn is looked for where none of the special ones does.

    Raises ThreestepError where the template ends the last turn with none of them.
    """
    try:
        return _learn(template, special_tokens, end_token)
    except _NoEnd:
        if set(added_tokens) <= set(special_tokens):
            raise
    return _learn(template, added_tokens, end_token)


class _NoEnd(ThreestepError):
    """Raised where no token ends a turn."""


def _learn(template: ChatTemplate, special_tokens: Sequence[str], end_token: str | None) -> TemplateHabits:
    longest_first = sorted({*special_tokens, *([end_token] if end_token else [])} - {""}, key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
    letters = [{"role": "assistant" if c in "bd" else "user", "content": c} for c in "abcd"]
    probe = mask_messages(letters, "probe")
    a, b, c, d = (str(message["content"]) for message in probe.messages)
    try:
        whole = template.render(probe.messages).text
        open_a, open_c = (template.render(probe.messages[:n], generation_prompt=True).text for n in (1, 3))
        closed_c = template.render(probe.messages[:3]).text
    except TemplateRefused as refused:
        if end_token is None:
            raise ThreestepError(
                "the chat template rejects alternating user and assistant messages, so the token that ends a turn "
                f"cannot be derived from it ({refused}); set that token with --end_of_conversation_token"
            ) from refused
        return TemplateHabits(special, (end_token,))
    if [whole.count(letter) for letter in (a, b, c, d)] != [1, 1, 1, 1]:
        raise ThreestepError(
            "the chat template does not render each user and assistant message exactly once, so it cannot be used for "
            "training; use another one (--chat_template FILE), or --prompt_style human_assistant"
        )
    before_b, before_d = _between(whole, a, b), _between(whole, c, d)
    prompt_b, prompt_d = open_a.partition(a)[2], open_c.partition(c)[2]
    after_b, after_d = _between(whole, b, c), whole.partition(d)[2]
    pairs = [(before_b, prompt_b), (before_d, prompt_d), (_before_nothing(template, probe, after_b), prompt_b)]
    prompt = _added_prompt(prompt_d, closed_c.partition(c)[2], special)
    always = "" if prompt else _constant_prompt(pairs[0], after_b, after_d, special)
    headers = _headers(prompt or always, pairs, special)
    missing_prompt = "" if headers or not before_b.startswith(prompt_b) else before_b[len(prompt_b) :]
    missing_prompt = missing_prompt if missing_prompt.strip() else ""
    headers = headers or ((missing_prompt,) if missing_prompt else ())
    openings = _openings(special, headers, whole.partition(a)[0], after_b, after_d=after_d)
    asking = special.findall(before_b) if special else []
    habits = TemplateHabits(
        special,
        ends=(),
        headers=headers,
        missing_prompt=missing_prompt,
        always_asks=bool(always),
        asking=frozenset(asking[1:] or asking),
        openings=openings,
    )
    return _with_ends(habits, after_b, after_d, end_token=end_token, eos_token=template.eos_token)


def _before_nothing(template: ChatTemplate, probe: MaskedMessages, after_b: str) -> str:
    """The text before an answer without text: EXAONE 4's template leaves out its prompt's thought there. "" where the
    template does not end such an answer as it ends others."""
    a, b, c, _ = probe.messages
    try:
        text = template.render([a, {**b, "content": ""}, c]).text
    except TemplateRefused:
        return ""
    written = _between(text, str(a["content"]), str(c["content"]))
    return written.removesuffix(after_b) if written.endswith(after_b) else ""


def _added_prompt(asked: str, closed: str, special: re.Pattern[str] | None) -> str:
    """The generation prompt in what follows c with it; without it, a template may end with eos there (Metharme's)."""
    if asked.startswith(closed):
        return asked.removeprefix(closed)
    return asked[len(_whole_words(commonprefix([asked, closed]), asked, special)) :]


def _constant_prompt(pair: tuple[str, str], after_b: str, after_d: str, special: re.Pattern[str] | None) -> str:
    """The prompt with which every conversation ends, whoever spoke last; "" where there is none. pair: what precedes b
    in the conversation, and as a generation prompt."""
    before_b, prompt_b = pair
    end = after_d[len(_whole_words(commonprefix([after_b, after_d]), after_d, special)) :]
    shared = commonprefix([before_b, prompt_b])[len(prompt_b) - len(end) :]
    return end if prompt_b.endswith(end) and shared.strip() else ""


def _headers(prompt: str, pairs: Sequence[tuple[str, str]], special: re.Pattern[str] | None) -> tuple[str, ...]:
    """The prompt, and its beginnings that precede answers. pairs: what precedes one in the conversation, and as a
    generation prompt."""
    shared = [
        _whole_words(commonprefix([before, prompted])[len(prompted) - len(prompt) :], prompt, special)
        for before, prompted in pairs
    ]
    return tuple(sorted({prompt, *shared} - {""}, key=len, reverse=True))


def _whole_words(beginning: str, prompt: str, special: re.Pattern[str] | None) -> str:
    """A beginning of the generation prompt, cut back to a blank or special token: "<" of "<think>" is no header."""
    if beginning == prompt:
        return prompt
    match = re.match(r"(?s).*(?:\s|" + (special.pattern if special else r"\s") + ")", beginning)
    return match.group() if match else ""


def _openings(
    special: re.Pattern[str] | None, headers: Sequence[str], before_a: str, after_b: str, *, after_d: str
) -> frozenset[str]:
    """Special tokens in a header, or between b and c after the one that ends b's turn (where the first of them ends
    it), that do not follow the whole conversation."""
    if special is None:
        return frozenset()
    openings = {*special.findall("".join(headers[:1])), *special.findall(before_a)[-1:]}
    between = special.findall(after_b)
    openings |= set(between if between and between[0] in openings else between[1:])
    return frozenset(openings.difference(special.findall(after_d)))


def _with_ends(
    habits: TemplateHabits, after_b: str, after_d: str, *, end_token: str | None, eos_token: str
) -> TemplateHabits:
    """The habits with the tokens that end a turn. after_b, after_d: what follows b, before c, and d."""
    last, earlier = habits.ending(after_d), habits.ending(after_b)
    if end_token is not None and end_token in after_d:
        return replace(habits, ends=(end_token,))
    if last is None:
        follows = habits.next_speaker(after_b)
        ends = dict.fromkeys([*([end_token] if end_token else []), *([follows.group()] if follows else [])])
        if not ends:
            raise _NoEnd(
                f"the chat template adds {after_d!r} after the assistant's last text, but no special token that "
                "ends the turn, so a model would never learn to stop; name the token to add to the last turn with "
                "--end_of_conversation_token, or change the template (--chat_template FILE)"
            )
        return replace(habits, ends=tuple(ends), is_open=True)
    if end_token is not None:
        raise ThreestepError(
            f"--end_of_conversation_token: the chat template adds {after_d!r} after the assistant's last text, "
            f"not '{end_token}'; remove the flag, or change the template"
        )
    # Cohere's answers end with <|END_RESPONSE|><|END_OF_TURN_TOKEN|>, of which the second, its eos, is the stop.
    both = habits.special.findall(commonprefix([after_b, after_d])) if habits.special else []
    if eos_token in both:
        return replace(habits, ends=(eos_token,))
    earlier = earlier or habits.next_speaker(after_b)  # Metharme's earlier answers end with the user's token
    ends = dict.fromkeys(match.group() for match in (last, earlier) if match is not None)
    return replace(habits, ends=tuple(ends))


def _between(text: str, one: str, other: str) -> str:
    return text[text.index(one) + len(one) : text.index(other)] if one in text and other in text else ""
