"""Conversations become token ids under a chat template: which template, which tokens carry loss, which end a turn.

A rendered conversation is tokenized as a whole, as transformers does it, and the ids are cut where the assistant's
turns begin and end, so that lengths tell which tokens carry loss. The tokenizer's special tokens stay special in a
message's text (`<|im_end|>` typed by a user is the token `<|im_end|>`), as in transformers' `apply_chat_template`.
Knows nothing of rows, files or phases.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.data.chat.rendering import ChatTemplate
from training.utils.data.chat.spans import ReadConversation, TurnFinder
from training.utils.data.chat.unread import UnreadParts
from training.utils.data.formats.messages import BadConversation, Conversation
from training.utils.data.rows.tokenize import EncodedParts, Ids, TextTokenizer, named_tokenizer

if TYPE_CHECKING:
    from training.utils.data.rows.arguments import ChatArguments

_TAG = re.compile(r"[<\u25c1](/?)([A-Za-z][\w:.-]*)[>\u25b7]")  # <think>, and Kimi's with triangles
OTHER_PROMPT = "trained without the end of the generation prompt, which the chat template does not write before answers"
UNWRITTEN = "whose text next to a tool call the chat template omits"
_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # transformers' names


@dataclass(slots=True)
class TextPiece:
    """A part of a row's text; `is_turn`: an assistant's turn, or part of one; `is_end`: the last part, behind which a
    model stops."""

    text: str
    is_turn: bool = False
    carries_loss: bool = False
    is_end: bool = False


class ChatTokenizer:
    """Templates, turns and tokens for the conversations of one run."""

    def __init__(self, chat: ChatArguments, tokenizer: Any) -> None:
        """Raises ThreestepError where there is no template, or one that does not end a turn with a token."""
        self._chat = chat
        self._tokenizer = tokenizer
        self._file = chat.given_template
        if self._file is None and not tokenizer.chat_template:
            raise ThreestepError(
                f"--prompt_style chat_template: {named_tokenizer(tokenizer)} has no chat template; pass one with "
                "--chat_template FILE"
            )
        self._finders: dict[tuple[str, str], TurnFinder] = {}
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self.added = [token.content for token in added]
        named = map(str, getattr(tokenizer, "all_special_tokens", ()))  # an eos token need not be marked as special
        self.special = list(dict.fromkeys([*(token.content for token in added if token.special), *named]))
        self.end_token = self.finder(None, {}).ends[0]
        self.texts = TextTokenizer(tokenizer, self.end_token)

    def finder(self, tools: Any, kwargs: dict[str, Any]) -> TurnFinder:
        """Return the finder of turns. A tokenizer may have several templates, one for tools; each has a finder."""
        text = self._file
        if text is None:
            text = template_text(self._tokenizer, tools, named_tokenizer(self._tokenizer))
        kwargs = {**self._chat.template_kwargs, **kwargs}
        key = (text, json.dumps(kwargs, sort_keys=True, default=repr))
        if key not in self._finders:
            template = ChatTemplate(text, {**self._tokenizer.special_tokens_map, **kwargs})
            try:
                self._finders[key] = TurnFinder(
                    template, self.special, self._chat.end_of_conversation_token, self.added
                )
            except ThreestepError as refused:
                whose = self._chat.chat_template or named_tokenizer(self._tokenizer)
                raise ThreestepError(f"{whose}: {refused}") from refused
        return self._finders[key]

    def _finder_of(self, conversation: Conversation) -> TurnFinder:
        return self.finder(conversation.tools, conversation.template_kwargs)

    def decode(self, ids: Sequence[Ids]) -> list[str]:
        """Return texts, special tokens among them."""
        if getattr(self._tokenizer, "is_fast", False):  # without transformers' check of every id
            return self._tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)
        return self._tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def unread(self, conversation: Conversation) -> UnreadParts:
        """Return the check of what the conversation's template does not read."""
        return UnreadParts(self._finder_of(conversation).template)

    # Conversation -> pieces.

    def sentence(self, conversation: Conversation, train_turns: str) -> tuple[list[TextPiece], tuple[str, ...]] | None:
        """The conversation, with loss on all assistant turns or the `last`, without the `untrained`, and notes for the
        report; None: no turn. A turn that ends it stands behind the prompt that asks for it (see `_behind`). Raises
        BadConversation."""
        finder = self._finder_of(conversation)
        read = finder.read(conversation)
        if not read.turns:
            return None
        notes = (UNWRITTEN,) if read.left_out else ()
        *earlier, answer = read.messages
        if finder.asks_more and earlier and answer["role"] == "assistant":
            start = _opened(finder, replace(conversation, messages=earlier))
            read = self._behind(start, read) or read
            notes = notes if read.text.startswith(start.text) else (OTHER_PROMPT, *notes)
        places = [place for place, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        trained = {turn.message for turn in read.turns} if train_turns == "all" else {places[-1]}
        trained -= conversation.untrained
        for turn in read.turns:
            if turn.message in trained and not turn.ended:
                raise BadConversation(
                    f"{conversation.where}, message {turn.message + 1} (assistant): the chat template writes no "
                    f"end-of-turn token after it, only {read.text[turn.end : turn.end + 40]!r}"
                )
        return self._cut(read, trained), notes

    def prompt(self, conversation: Conversation) -> list[TextPiece]:
        """The conversation with the generation prompt. Raises BadConversation."""
        return self._cut(_opened(self._finder_of(conversation), conversation), set())

    def responses(
        self, prompt: Conversation, responses: Sequence[dict[str, Any]]
    ) -> tuple[list[TextPiece], list[TextPiece]] | None:
        """The prompt's pieces, and a piece for each response: what follows the prompt in the rendering of both, to the
        end of the turn (see `_behind`). None where it cannot follow the prompt. Raises BadConversation."""
        finder = self._finder_of(prompt)
        start = _opened(finder, prompt)
        answers = []
        for message in responses:
            read = finder.read(replace(prompt, messages=[*prompt.messages, message]))
            last = read.turns[-1] if read.turns else None
            if last is None or last.message != len(prompt.messages) or not last.ended:
                raise BadConversation(
                    f"{prompt.where}: the chat template writes no end-of-turn token after the response: the text ends "
                    f"in {read.text[-40:]!r}"
                )
            behind = self._behind(start, read)
            if behind is None:
                return None
            answers.append(TextPiece(behind.text[len(start.text) : behind.turns[-1].end], is_turn=True, is_end=True))
        return self._cut(start, set()), answers

    def _behind(self, start: ReadConversation, read: ReadConversation) -> ReadConversation | None:
        """The last turn of `read` behind the prompt that asks for it; None where it cannot follow that prompt.

        A template may end the generation prompt with text that it does not write before an answer: an empty thought.
        Then the answer as the template writes it follows the whole prompt, as it does when a model answers.
        """
        prompt, last = start.text, read.turns[-1]
        if read.text.startswith(prompt):
            if last.end <= len(prompt):
                return None
            # An answer may begin with what the prompt ends with: the tag of a thought.
            return replace(read, turns=(*read.turns[:-1], replace(last, begin=max(last.begin, len(prompt)))))
        begin = next(turn.begin for turn in read.turns if turn.message == last.message)
        answer, added = read.text[begin : last.end], prompt[begin:]
        if not prompt.startswith(read.text[:begin]) or not _may_precede(added, answer):
            return None
        turn = replace(last, begin=len(prompt), end=len(prompt) + len(answer))
        return replace(read, text=prompt + read.text[begin:], turns=(*start.turns, turn))

    def _cut(self, read: ReadConversation, trained: set[int]) -> list[TextPiece]:
        pieces = []
        at = 0
        following = [turn.message for turn in read.turns[1:]]
        for turn, next_message in zip_longest(read.turns, following):
            pieces.append(TextPiece(read.text[at : turn.begin]))
            is_end = turn.ended and next_message != turn.message
            pieces.append(TextPiece(read.text[turn.begin : turn.end], True, turn.message in trained, is_end))
            at = turn.end
        pieces.append(TextPiece(read.text[at:]))
        return [piece for piece in pieces if piece.text]

    def text(self, text: str) -> list[TextPiece]:
        """A text that answers no prompt: without the template, to the end token, behind what the tokenizer puts before
        any text."""
        (before,) = self.decode([self.texts.prefix_ids])
        whole = TextPiece(text.removesuffix(self.end_token) + self.end_token, True, True, is_end=True)
        return [TextPiece(before), whole] if before else [whole]

    # Pieces -> tokens.

    def encode(self, rows: Sequence[Sequence[TextPiece]], prompts: Sequence[int]) -> list[EncodedParts]:
        """Ids of each piece of each row: those of the row's whole text. prompts: how many pieces of a row are its
        prompt, which each other one answers; all of them are one text where no other is left."""
        if all(len(row) == count for row, count in zip(rows, prompts, strict=True)):
            texts = [[piece.text for piece in row] for row in rows]
            return self.texts.encode_parts(texts, [[piece.is_turn for piece in row] for row in rows])
        asked = ["".join(piece.text for piece in row[:count]) for row, count in zip(rows, prompts, strict=True)]
        answers = [[piece.text for piece in row[count:]] for row, count in zip(rows, prompts, strict=True)]
        assert all(answers), "rows of one kind all have answers, or none has"
        encoded = self.texts.encode_answers(asked, answers)
        for each, count in zip(encoded, prompts, strict=True):
            each.parts[1:1] = [[] for _ in range(count - 1)]
        return encoded


def _opened(finder: TurnFinder, conversation: Conversation) -> ReadConversation:
    """The conversation with the generation prompt, and its turns."""
    if all(message["role"] != "assistant" for message in conversation.messages):
        return ReadConversation(finder.prompt(conversation), (), conversation.messages)
    return finder.read(conversation, generation_prompt=True)


def _may_precede(added: str, answer: str) -> bool:
    """True if an answer may follow the text that the generation prompt adds to the header: every tag is closed, as in
    "<think></think>", the answer has none of them, and besides there is white space alone."""
    tags = _TAG.findall(added)
    opened = Counter(name for slash, name in tags if not slash)
    closed = Counter(name for slash, name in tags if slash)
    rest = _TAG.sub("", added)
    tags_in = {name for _, name in _TAG.findall(answer)}
    return opened == closed and not tags_in & opened.keys() and not rest.strip()


def template_text(tokenizer: Any, tools: Any, whose: str) -> str:
    """The template for a conversation: the one for tools where there are some, otherwise the default, or the only one.

    whose: the tokenizer, for the error. Raises ThreestepError where several have other names.
    """
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        return templates
    if tools and _FOR_TOOLS in templates:
        return templates[_FOR_TOOLS]
    if _DEFAULT in templates:
        return templates[_DEFAULT]
    others = [name for name in templates if name != _FOR_TOOLS] or list(templates)
    if len(others) == 1:
        return templates[others[0]]
    raise ThreestepError(
        f"{whose} has the chat templates {', '.join(map(repr, templates))}, but none named '{_DEFAULT}'; pass one with "
        "--chat_template FILE"
    )
