"""Questions to a chat endpoint in OpenAI's form.

Nothing is taken from the environment (OPENAI_BASE_URL, OPENAI_API_KEY, ...), so that a key goes to no other address
than the file's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from threestep.plugins.judges.verdicts import AskedQuestion, Verdict
from threestep.plugins.serving.asking.failures import FailedRequest, cut_fault
from threestep.plugins.serving.asking.posting import Post

if TYPE_CHECKING:
    from threestep.plugins.judges.service import Send

OPENAI_URL = "https://api.openai.com/v1"
_MOST_BYTES = 4 * 2**20  # of an answer


@dataclass(frozen=True)
class JudgeSettings:
    """model: as the endpoint calls it. base_url: of the endpoint, up to /v1. system: a message before the question.
    temperature, max_tokens: of replies. fields: further ones of a request, such as seed or reasoning_effort."""

    model: str
    base_url: str = OPENAI_URL
    system: str | None = None
    temperature: float | None = 0.0
    max_tokens: int | None = 1024
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """The request fields other than messages that verdicts depend on."""
        own = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens, **self.fields}
        return {name: value for name, value in own.items() if value is not None}

    def messages(self, question: str) -> list[dict[str, str]]:
        """The messages of a request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question}]


def chat_sender(
    settings: JudgeSettings, key: str | None, seconds: float, reads: Callable[[str], float | None], *, counts: bool
) -> Send:
    """Return what sends one question. reads: a reply's number. counts: tokens have a bound, so that replies must say
    how many there were."""
    post = Post(f"{settings.base_url.rstrip('/')}/chat/completions", key, _MOST_BYTES)

    def send(questions: Sequence[AskedQuestion]) -> list[Verdict]:
        [question] = questions
        body = {"messages": settings.messages(question.content), **settings.request}
        return [_verdict(post.answer(body, seconds), reads, counts)]

    return send


def _verdict(answer: Any, reads: Callable[[str], float | None], counts: bool) -> Verdict:
    """Return the number in a reply."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if counts and type(tokens) is not int:
        raise FailedRequest("most_tokens needs the field 'usage' in replies, but this reply has none", is_final=True)
    tokens = tokens if type(tokens) is int else 0
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (LookupError, TypeError) as problem:
        raise FailedRequest(f"the reply has no choices: {cut_fault(str(answer))}", tokens=tokens) from problem
    value = reads(text) if isinstance(text, str) else None
    if value is None:
        end = " (cut at max_tokens)" if choice.get("finish_reason") == "length" else ""
        raise FailedRequest(f"the reply has no verdict{end}: {cut_fault(str(text)[-80:])!r}", tokens=tokens)
    return Verdict(value, text, tokens)
