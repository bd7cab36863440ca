"""`--reward http:URL`: a reward model behind HTTP, such as `threestep serve reward`.

    POST {"prompts": [..], "responses": [..], "query": [..], "labels": [..], "messages": [..], ...}
    answer {"rewards": [one number for each]}

`query` (prompt and response in one text), `labels` (the references) and the answer are those of OpenRLHF's remote
reward models. `prompt_ids`, `response_ids` and `tokenizer` are there where the run knows them: a server with that
tokenizer reads exactly what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.judges.rule import AskedRule, shown_sample
from threestep.plugins.judges.settings import read_settings, settings_from
from threestep.plugins.judges.verdicts import AskedQuestion, Verdict
from threestep.plugins.serving.asking.failures import FailedRequest
from threestep.plugins.serving.asking.posting import Post
from threestep.plugins.serving.asking.settings import AskSettings, check_url
from threestep.plugins.serving.keys import KEY_VARIABLE
from training.utils.base.errors import Mistakes
from training.utils.rewards.calling import MESSAGES

if TYPE_CHECKING:
    from threestep.plugins.judges.service import Send

_MOST_BYTES = 4 * 2**20  # of an answer
_LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True)
class HttpSettings:
    """url: of the server. model: named in requests, for servers of several. batch: responses of one request."""

    url: str
    model: str | None = None
    batch: int = 16


class HttpReward(AskedRule):
    """Rewards that a server returns for prompts and responses."""

    reads_ids = True

    def __init__(self, name: str, where: str, settings: HttpSettings, asking: AskSettings) -> None:
        super().__init__(name, where, asking, KEY_VARIABLE, per_request=settings.batch)
        self._http = settings

    def sender(self) -> Send:
        post, seconds = Post(self._http.url, self.key(), _MOST_BYTES), self._settings.seconds

        def send(questions: Sequence[AskedQuestion]) -> list[Verdict]:
            return [Verdict(value) for value in _rewards(post.answer(self._body(questions), seconds), len(questions))]

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
    """Return the reward for a URL, or for a YAML file that contains one, given as the value of `flag`."""
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
        f"{where}: most_tokens limits what a judge generates, but a reward server generates no text; remove it",
    )
    mistakes.raise_if_any()
    return HttpReward(name, where, settings, asking or AskSettings())


def _rewards(answer: Any, count: int) -> list[float]:
    """Return the numbers in a reply."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        got = f"{len(rewards)}" if isinstance(rewards, list) else f"{str(answer):.80}"
        raise FailedRequest(f"expected {{'rewards': [..]}} with {count} numbers, got {got}")
    for number in rewards:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or abs(number) > _LARGEST:
            raise FailedRequest(f"expected numbers that are finite in float32, got {number!r:.60}")
    return [float(number) for number in rewards]
