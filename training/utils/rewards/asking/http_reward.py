"""`--reward http:URL`: a reward model behind HTTP, such as `threestep serve-reward`.

    POST {"prompts": [..], "responses": [..], "query": [..], "labels": [..], "messages": [..], ...}
    answer {"rewards": [one number for each]}

`query` (prompt and response in one text), `labels` (the references) and the answer are those of OpenRLHF's remote
reward models. `prompt_ids`, `response_ids` and `tokenizer` are there where the run knows them: a server with that
tokenizer reads exactly what was drawn.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from training.utils.base.errors import Mistakes
from training.utils.base.keys import KEY_VARIABLE
from training.utils.base.storage import parse_json
from training.utils.rewards.asking.rule import AskedRule, shown_sample
from training.utils.rewards.asking.service import FailedRequest, Send, cut_fault, not_within
from training.utils.rewards.asking.settings import (
    AskSettings,
    check_url,
    is_this_machine,
    read_settings,
    settings_from,
)
from training.utils.rewards.asking.verdicts import AskedQuestion, Verdict
from training.utils.rewards.calling.calling import MESSAGES

_MOST_BYTES = 64 * 2**20  # of an answer
_LARGEST = 3.4028234663852886e38  # of float32
# Errors that another request may not meet: timeouts, conflicts, too many requests, and the server's own.
_PASSING = {408, 409, 425, 429}


@dataclass(frozen=True)
class HttpSettings:
    """url: of the server. model: named in requests, for servers of several. batch: responses of one request."""

    url: str
    model: str | None = None
    batch: int = 16


class HttpReward(AskedRule):
    """The numbers of a server for pairs of prompt and response."""

    reads_ids = True

    def __init__(self, name: str, where: str, settings: HttpSettings, asking: AskSettings) -> None:
        super().__init__(name, where, asking, KEY_VARIABLE, per_request=settings.batch)
        self._http = settings

    def sender(self) -> Send:
        key, body_of = self.key(), self._body
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        opener = opener_of(self._http.url)

        def send(questions: Sequence[AskedQuestion]) -> list[Verdict]:
            body = json.dumps(body_of(questions)).encode()
            request = urllib.request.Request(self._http.url, body, headers)  # noqa: S310 (its scheme is checked)
            return [
                Verdict(value) for value in _rewards(posted(opener, request, self._settings.seconds), len(questions))
            ]

        return send

    def _body(self, questions: Sequence[AskedQuestion]) -> dict[str, Any]:
        contents = [question.content for question in questions]
        body: dict[str, Any] = {name: [content[name] for content in contents] for name in contents[0]}
        if "response_ids" in body:
            body["tokenizer"] = self._tokenizer
        return body if self._http.model is None else {"model": self._http.model, **body}

    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        return self._service.values(self._questions(prompts, responses, columns), self.send)

    def _questions(self, prompts: list[str], responses: list[str], columns: dict[str, Any]) -> list[AskedQuestion]:
        count = len(responses)
        references = columns.get("ground_truth") or [None] * count
        messages = columns.get(MESSAGES) or [None] * count
        ids = {name: columns[name] for name in ("prompt_ids", "response_ids") if columns.get(name) is not None}
        found = []
        for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            asked = {
                "prompts": prompt,
                "responses": response,
                "labels": None if references[place] is None else str(references[place]),
                "messages": messages[place],
                **{name: list(given[place]) for name, given in ids.items()},
            }
            content = {**asked, "query": prompt + response}
            who = {"model": self._http.model} if self._http.model is not None else {}
            found.append(AskedQuestion({**who, **asked}, content, shown_sample(prompt, response)))
        return found


def http_reward(given: str, name: str, flag: str = "--reward") -> HttpReward:
    """Return the reward of a URL, or of a YAML file with one, which is the value of `flag`."""
    where = f"{flag} {given}"
    if "://" in given:
        settings, asking = HttpSettings(given.removeprefix("http:") if given.startswith("http:http") else given), None
    else:
        path = given.removeprefix("http:")
        settings, asking = settings_from(read_settings(path, where), where, HttpSettings, AskSettings)
    check_url(settings.url, where)
    mistakes = Mistakes()
    (asking or AskSettings()).check(where, mistakes)
    mistakes.require(settings.batch >= 1, f"{where}: batch expects 1 or more, got {settings.batch}")
    mistakes.require(
        asking is None or asking.most_tokens is None,
        f"{where}: most_tokens counts what a judge writes, and a server of rewards writes nothing; leave it out",
    )
    mistakes.raise_if_any()
    return HttpReward(name, where, settings, asking or AskSettings())


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to the address that was given, and to no other."""

    def redirect_request(self, *given: Any) -> None:
        return None


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """Return what sends requests to this address: no redirects, and no proxy for this machine."""
    direct = [urllib.request.ProxyHandler({})] if is_this_machine(url) else []
    return urllib.request.build_opener(_NoRedirect(), *direct)


def posted(opener: urllib.request.OpenerDirector, request: urllib.request.Request, seconds: float) -> bytes:
    """Return the body of the answer to a request; FailedRequest if there is none."""
    try:
        with opener.open(request, timeout=seconds) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as problem:
        with problem:
            said = cut_fault(problem.read(4096).decode("utf-8", "replace"))
        is_final = problem.code not in _PASSING and problem.code < 500
        after = problem.headers.get("Retry-After", "")
        raise FailedRequest(
            f"the server answered {problem.code}: {said or problem.reason}",
            is_final,
            float(after) if after.isdigit() else None,
        ) from problem
    except (OSError, HTTPException) as problem:
        reason = getattr(problem, "reason", problem)
        if isinstance(reason, TimeoutError):
            raise not_within(seconds) from problem
        raise FailedRequest(f"no answer from {request.full_url}: {reason}") from problem
    if len(content) > _MOST_BYTES:
        raise FailedRequest(f"the answer has more than {_MOST_BYTES:,} bytes")
    return content


def _rewards(content: bytes, count: int) -> list[float]:
    """Return the numbers in an answer."""
    try:
        answer = parse_json(content)
    except ValueError as problem:
        raise FailedRequest("the answer is not JSON") from problem
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        got = f"{len(rewards)}" if isinstance(rewards, list) else f"{str(answer):.80}"
        raise FailedRequest(f"expected {{'rewards': [..]}} with {count} numbers, got {got}")
    for number in rewards:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or abs(number) > _LARGEST:
            raise FailedRequest(f"expected numbers that are finite in float32, got {number!r:.60}")
    return [float(number) for number in rewards]
