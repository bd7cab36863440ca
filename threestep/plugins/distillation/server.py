"""A teacher behind an address in OpenAI's form, by its prompt log-probabilities, as vLLM answers:

    POST URL/completions {"model", "prompt": [token ids], "max_tokens": 1, "prompt_logprobs": k, "temperature": 1}
    answer choices[0].prompt_logprobs: null, then for each further token {ID: {"logprob", "rank"}}: the k likeliest, and
    the token itself where it is not among them

A failure is never a distribution: a request is sent again, and what stays unanswered ends the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.distillation.settings import URL_FLAG
from threestep.plugins.distillation.top_tokens import TopTable, keys_of, keys_of_rows, rest_of, sequences_of_rows
from threestep.plugins.serving.asking.failures import LONGEST_PAUSE_SECONDS, FailedRequest
from threestep.plugins.serving.asking.posting import Post
from threestep.plugins.serving.asking.settings import AskSettings, check_url
from threestep.plugins.serving.keys import KEY_VARIABLE, given_key
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.distillation.top_tokens import TopTokens
    from training.utils.contracts.token_rows import TokenRows

_PROBES = ("What is 2 + 3? naïve 🍐", "def f(x):\n    return 1234567")
# The likeliest tokens at a place, with their log-probabilities.
Place = tuple[list[int], list[float]]


class ServerTeacher:
    """A model behind `url`, asked for the `top_k` likeliest tokens. It keeps the answers of one micro-batch after the
    other until there are `keeps` places: further epochs over a rollout ask nothing."""

    def __init__(self, url: str, top_k: int, asking: AskSettings | None = None, keeps: int = 1_000_000) -> None:
        check_url(url, f"{URL_FLAG} {url}")
        self.url, self._top_k, self._asking, self._keeps = url.rstrip("/"), top_k, asking or AskSettings(), keeps
        self._post = Post(url, given_key(None, KEY_VARIABLE, URL_FLAG))
        self._known: dict[int, Place] = {}

    def check(self, encode: Callable[[str], list[int]]) -> None:
        """ThreestepError unless the model turns texts into the same ids as `encode`, which adds no special tokens."""
        for probe in _PROBES:
            body = {"model": self.model, "prompt": probe, "add_special_tokens": False}
            answer = self._answer("../tokenize", body)
            theirs = answer.get("tokens") if isinstance(answer, dict) else None
            if theirs != (own := encode(probe)):
                raise ThreestepError(
                    f"{URL_FLAG} {self.url}: the tokenizer of '{self.model}' turns '{probe:.20}' into "
                    f"{str(theirs):.60}, but the tokenizer of the model in training turns it into {str(own):.60}; "
                    "use a teacher of the same family"
                )

    @cached_property
    def model(self) -> str:
        """The name of the server's first model."""
        answer = self._answer("models", None)
        models = answer.get("data") if isinstance(answer, dict) else None
        if not (isinstance(models, list) and models and isinstance(models[0], dict) and models[0].get("id")):
            raise ThreestepError(f"{URL_FLAG} {self.url}: expected a list of models at /models, got {str(answer):.100}")
        return str(models[0]["id"])

    def top_tokens(self, rows: TokenRows) -> TopTokens:
        """Return what follows each different target's beginning."""
        keys, _ = keys_of_rows(rows), self.model
        wanted = [ids for ids in sequences_of_rows(rows) if any(key not in self._known for key in keys_of(ids[:-1]))]
        if len(self._known) > self._keeps:
            self._known.clear()
        with ThreadPoolExecutor(self._asking.concurrency) as pool:
            for ids, places in zip(wanted, pool.map(self._asked, wanted), strict=True):
                self._known |= zip(keys_of(ids[:-1]), places, strict=True)
        found = [self._known[key] for key in keys]
        ids_nk = np.array([ids for ids, _ in found], np.int32).reshape(len(found), self._top_k)
        logprobs_nk = np.array([logprobs for _, logprobs in found], np.float32).reshape(len(found), self._top_k)
        return TopTable(keys, ids_nk, logprobs_nk, rest_of(logprobs_nk)).of(keys)

    def _asked(self, ids: Sequence[int]) -> list[Place]:
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._top_k,
        }
        return self._tried("completions", body, lambda answer: places_of(answer, ids, self._top_k))

    def _answer(self, path: str, body: Any) -> Any:
        return self._tried(path, body, lambda answer: answer)

    def _tried(self, path: str, body: Any, read: Callable[[Any], Any]) -> Any:
        """Return what `read` makes of an answer; ThreestepError once it is given up."""
        base = self.url.rpartition("/")[0] if path.startswith("../") else self.url
        pause = self._asking.pause
        for attempt in range(self._asking.retries + 1):
            try:
                address = f"{base}/{path.removeprefix('../')}"
                return read(self._post.answer(body, self._asking.seconds, address))
            except FailedRequest as failure:
                if failure.is_final or attempt == self._asking.retries:
                    raise ThreestepError(
                        f"{URL_FLAG} {self.url}: no answer from the teacher after {attempt + 1} requests: {failure}"
                    ) from failure
                time.sleep(max(pause, min(failure.after or 0.0, 60.0)))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")


def places_of(answer: Any, ids: Sequence[int], top_k: int) -> list[Place]:
    """Return the `top_k` likeliest tokens at each place of `ids` but the first. FailedRequest for another answer."""
    try:
        found = answer["choices"][0].get("prompt_logprobs", answer.get("prompt_logprobs"))
        if not isinstance(found, list) or len(found) != len(ids):
            got = len(found) if isinstance(found, list) else "none"
            raise FailedRequest(f"expected prompt_logprobs for {len(ids)} tokens, got {got}", is_final=found is None)
        return [_place(each, ids[number], top_k) for number, each in enumerate(found) if number]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
        raise FailedRequest(f"the answer has an unexpected format: {type(problem).__name__} {problem}") from problem


def _place(found: dict[str, Any], token: int, top_k: int) -> Place:
    numbers = {int(each): float(entry["logprob"]) for each, entry in found.items()}
    if token not in numbers:
        raise FailedRequest(
            f"the server did not read the tokens it was sent: {token} is not among {str(list(numbers)):.60}"
        )
    best = sorted(numbers.items(), key=lambda entry: -entry[1])[:top_k]
    if len(best) < top_k or not all(math.isfinite(value) and value <= 1e-4 for _, value in best):
        raise FailedRequest(f"expected {top_k} log-probabilities of at most 0, got {best!s:.100}", is_final=True)
    return [each for each, _ in best], [value for _, value in best]
