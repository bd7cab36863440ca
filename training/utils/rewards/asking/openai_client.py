"""Questions to a chat endpoint in OpenAI's form, by the package `openai`. The one module that knows it.

The client's retries are off: the service counts requests. It takes nothing from the environment (OPENAI_BASE_URL,
OPENAI_API_KEY, OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS, ...), so that a key goes to no other address than the file's.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.rewards.asking.service import FailedRequest, Send, cut_fault, not_within
from training.utils.rewards.asking.settings import is_this_machine
from training.utils.rewards.asking.verdicts import AskedQuestion, Verdict

OPENAI_URL = "https://api.openai.com/v1"
_PASSING = {408, 409, 425, 429}  # errors that another request may not meet, with 500 and more
_NO_KEY = "none"  # for servers that look at none: the client refuses to be without
_OF_ENVIRONMENT = "OPENAI_"
_environment = threading.Lock()


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
        """The fields of a request besides its messages, on which verdicts depend."""
        own = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens, **self.fields}
        return {name: value for name, value in own.items() if value is not None}

    def messages(self, question: str) -> list[dict[str, str]]:
        """The messages of a request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question}]


def check_installed(where: str) -> None:
    """ThreestepError where the package is missing."""
    if importlib.util.find_spec("openai") is None:
        raise ThreestepError(f"{where} needs the package openai, which is not installed: pip install threestep[judge]")


def chat_sender(
    settings: JudgeSettings, key: str | None, seconds: float, reads: Callable[[str], float | None], *, counts: bool
) -> Send:
    """Return what sends one question. reads: a reply's number. counts: tokens have a bound, so that replies must say
    how many there were."""
    import openai

    with _without_variables():
        by_proxy = not is_this_machine(settings.base_url)
        client = openai.OpenAI(
            api_key=key or _NO_KEY,
            base_url=settings.base_url,
            max_retries=0,
            timeout=seconds,
            http_client=openai.DefaultHttpxClient(follow_redirects=False, trust_env=by_proxy),
        )
    fields = settings.request
    known = {name: fields.pop(name) for name in ("model", "temperature", "max_tokens") if name in fields}

    def send(questions: Sequence[AskedQuestion]) -> list[Verdict]:
        [question] = questions
        messages: Any = settings.messages(question.content)
        try:
            answer = client.chat.completions.create(messages=messages, extra_body=fields, **known)
        except openai.APIStatusError as problem:
            raise _refused(problem.status_code, problem.message, problem.response.headers) from problem
        except openai.APITimeoutError as problem:  # a connection's error too
            raise not_within(seconds) from problem
        except openai.APIConnectionError as problem:
            raise FailedRequest(f"no answer from {settings.base_url}: {problem.__cause__ or problem}") from problem
        return [_verdict(answer, reads, counts)]

    return send


def _verdict(answer: Any, reads: Callable[[str], float | None], counts: bool) -> Verdict:
    """Return the number in an answer."""
    tokens = getattr(getattr(answer, "usage", None), "total_tokens", None)
    if counts and not isinstance(tokens, int):
        raise FailedRequest("most_tokens expects the field usage in replies, and there is none", is_final=True)
    tokens = tokens if isinstance(tokens, int) else 0
    try:
        choice = answer.choices[0]
        text = choice.message.content
    except (AttributeError, IndexError, TypeError) as problem:
        raise FailedRequest(f"the answer has no choices: {cut_fault(str(answer))}", tokens=tokens) from problem
    value = reads(text) if isinstance(text, str) else None
    if value is None:
        end = " (cut at max_tokens)" if getattr(choice, "finish_reason", None) == "length" else ""
        raise FailedRequest(f"the reply has no verdict{end}: {_end_of(text)!r}", tokens=tokens)
    return Verdict(value, text, tokens)


def _end_of(text: Any) -> str:
    return cut_fault(str(text)[-80:])


def _refused(status: int, message: str, headers: Mapping[str, str]) -> FailedRequest:
    after = headers.get("retry-after", "")
    is_final = (status not in _PASSING and status < 500) or "insufficient_quota" in message
    return FailedRequest(
        f"the endpoint answered {status}: {cut_fault(message)}", is_final, float(after) if after.isdigit() else None
    )


@contextmanager
def _without_variables() -> Iterator[None]:
    """Inside, the environment has none of OpenAI's variables, which the client would send or obey."""
    with _environment:
        taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_OF_ENVIRONMENT)}
        try:
            yield
        finally:
            os.environ.update(taken)
