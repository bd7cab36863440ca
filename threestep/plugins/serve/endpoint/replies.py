"""OpenAI's forms of answers: whole, and in pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threestep.plugins.serve.endpoint.lines import DrawnToken


@dataclass(frozen=True)
class Piece:
    """A further text of answer number `place` with its tokens, and what ended it. begin: characters of the tokens
    before."""

    place: int
    text: str
    tokens: Sequence[DrawnToken] = ()
    finish: str | None = None
    begin: int = 0


@dataclass(frozen=True)
class ReplyForms:
    """One request's answer. word: the text of a token's id. with_logprobs: those of the tokens are told."""

    model: str
    is_chat: bool
    with_logprobs: bool
    word: Callable[[int], str]
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece], prompt_tokens: int, drawn_tokens: int) -> dict[str, Any]:
        """All answers, each as one piece."""
        choices = [
            {**self._choice(piece), **({"message": _message(piece.text)} if self.is_chat else {"text": piece.text})}
            for piece in pieces
        ]
        return {**self._head(False), "choices": choices, "usage": usage(prompt_tokens, drawn_tokens)}

    def chunk(self, piece: Piece, is_first: bool = False) -> dict[str, Any]:
        """A piece of a stream. is_first: of its answer."""
        if self.is_chat:
            delta = {**({"role": "assistant"} if is_first else {}), **({} if piece.finish else {"content": piece.text})}
            if piece.finish and piece.text:
                delta["content"] = piece.text
            return {**self._head(True), "choices": [{**self._choice(piece), "delta": delta}]}
        return {**self._head(True), "choices": [{**self._choice(piece), "text": piece.text}]}

    def last(self, prompt_tokens: int, drawn_tokens: int) -> dict[str, Any]:
        """The end of a stream, with the numbers of tokens."""
        return {**self._head(True), "choices": [], "usage": usage(prompt_tokens, drawn_tokens)}

    def _head(self, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' if is_chunk else ''}"
        start = "chatcmpl-" if self.is_chat else "cmpl-"
        return {"id": start + self.number, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        of_tokens = None
        if self.with_logprobs:
            of_tokens = self._chat_logprobs(piece) if self.is_chat else self._text_logprobs(piece)
        return {"index": piece.place, "logprobs": of_tokens, "finish_reason": piece.finish}

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self.word(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if "\ufffd" not in text else None}

        content = [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.alternatives]}
            for each in piece.tokens
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, piece: Piece) -> dict[str, Any]:
        words = [self.word(each.token) for each in piece.tokens]
        return {
            "tokens": words,
            "token_logprobs": [each.logprob for each in piece.tokens],
            "top_logprobs": [{self.word(token): own for token, own in each.alternatives} for each in piece.tokens],
            "text_offset": [piece.begin + sum(map(len, words[:place])) for place in range(len(words))],
        }


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}


def usage(prompt_tokens: int, drawn_tokens: int) -> dict[str, int]:
    """The numbers of tokens, ends of answers counted."""
    total = prompt_tokens + drawn_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn_tokens, "total_tokens": total}
