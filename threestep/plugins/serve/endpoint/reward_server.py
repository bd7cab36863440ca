"""A reward model for programs: `POST /v1/scores`, the form of which `--reward http:URL` sends.

One request is scored at a time, with its own rows alone, so that equal requests have equal answers to the bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.model import start_alone
from threestep.plugins.evaluation.scorer import Scorer, load_answer_scorer
from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keyed import KeyedHandler, KeyedServer, parsed
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.loading.configurations import load_config, positions_of
from training.utils.loading.tokenizers import tokenizer_digest

if TYPE_CHECKING:
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.data.rows.tokenize import Ids

SCORES, MODELS = "/v1/scores", "/v1/models"
MOST_ROWS = 1024  # of a request
_SCORING_SECONDS = 3600.0
# Those that are read, and those that other servers read or that stand for what is read here.
_FIELDS = ("prompts", "responses", "messages", "prompt_ids", "response_ids", "tokenizer", "model", "query", "labels")


@dataclass(frozen=True)
class ServedReward:
    """A loaded reward model. most_tokens: that it reads, None without bound. vocabulary: its embeddings, which may be
    more than the tokenizer has, and may then have been drawn. tokenizer: a digest."""

    name: str
    scorer: Scorer
    most_tokens: int | None
    vocabulary: int
    tokenizer: str
    _lock: Any = field(default_factory=threading.Lock)

    def rewards(self, given: Any) -> list[float]:
        """Return the scores of a request. RefusedRequest for what is wrong with it."""
        request = _checked(given, self.name)
        with self._lock:  # tokenizers are changed while they encode, and forwards gain nothing from another beside them
            pairs = self._ids(request)
            for place, (prompt, response) in enumerate(pairs):
                length = len(prompt) + len(response)
                if self.most_tokens is not None and length > self.most_tokens:
                    raise RefusedRequest(
                        f"response {place} has {length} tokens including its prompt, but the model reads at most "
                        f"{self.most_tokens}; shorten them",
                        code="context_length_exceeded",
                    )
            scores = self.scorer.score_ids([prompt for prompt, _ in pairs], [response for _, response in pairs])
        if not all(map(math.isfinite, scores)):
            raise RefusedRequest("the model's scores are not finite: its weights have diverged", 500)
        return scores

    def _ids(self, request: dict[str, Any]) -> list[tuple[Ids, Ids]]:
        """The tokens as they were drawn where those are of the model's own tokenizer, or else those of the texts."""
        if request.get("response_ids") is not None and request.get("tokenizer") == self.tokenizer:
            return [
                self._checked_ids(*pair) for pair in zip(request["prompt_ids"], request["response_ids"], strict=True)
            ]
        messages = request.get("messages") or [None] * len(request["prompts"])
        found = []
        for prompt, own, response in zip(request["prompts"], messages, request["responses"], strict=True):
            try:
                found.append(self.scorer.ids_of_text(prompt if own is None else own, response))
            except ThreestepError as problem:
                raise RefusedRequest(str(problem)) from problem
        return found

    def _checked_ids(self, prompt: Any, response: Any) -> tuple[Ids, Ids]:
        size = self.vocabulary
        for ids in (prompt, response):
            if not isinstance(ids, list) or not ids or not all(type(id_) is int and 0 <= id_ < size for id_ in ids):
                raise RefusedRequest(f"'prompt_ids' and 'response_ids' must be lists of ids from 0 to {size - 1}")
        return prompt, response


def _checked(given: Any, name: str) -> dict[str, Any]:
    """Return a request's fields; RefusedRequest for unknown ones, and for lists of other lengths and kinds."""
    if not isinstance(given, dict):
        raise RefusedRequest("the body must be an object with 'prompts' and 'responses'")
    for field_name in given:
        if field_name not in _FIELDS:
            raise RefusedRequest(f"'{field_name:.60}' is not supported; leave it out", param=field_name)
    if given.get("model") not in (None, name):
        raise RefusedRequest(f"there is no model '{given['model']!s:.100}'; this server has '{name}'", 404)
    texts: dict[str, Callable[[Any], bool]] = dict.fromkeys(
        ("prompts", "responses"), lambda each: isinstance(each, str)
    )
    lists = texts | {"messages": lambda each: each is None or isinstance(each, list)}
    lists |= dict.fromkeys(("prompt_ids", "response_ids"), lambda each: isinstance(each, list))
    count = len(given["responses"]) if isinstance(given.get("responses"), list) else 0
    if not 1 <= count <= MOST_ROWS:
        raise RefusedRequest(f"'responses' must be a list of 1 to {MOST_ROWS} texts", param="responses")
    for field_name, is_right in lists.items():
        value = given.get(field_name)
        if value is None and field_name not in texts:
            continue
        if not isinstance(value, list) or len(value) != count or not all(map(is_right, value)):
            raise RefusedRequest(
                f"'{field_name}' must be a list with one entry for each of the {count} responses", param=field_name
            )
    if (given.get("prompt_ids") is None) != (given.get("response_ids") is None):
        raise RefusedRequest("'prompt_ids' and 'response_ids' must be given together; add the missing one")
    return given


class RewardServer(KeyedServer):
    """Serves a reward model to whoever has the key."""

    def __init__(self, port: int, served: ServedReward, key: str, most_bytes: int, *, address: str = ADDRESS) -> None:
        """port 0 takes a free one. OSError where it is taken."""
        super().__init__(port, _RewardHandler, key, most_bytes, most_connections=256, address=address)
        self.served = served


class _RewardHandler(KeyedHandler):
    server: RewardServer

    def get(self, path: str) -> None:
        if path != MODELS:
            self._refuse(path, SCORES)
        card = {"id": self.server.served.name, "object": "model", "created": 0, "owned_by": "threestep"}
        self.send(200, {"object": "list", "data": [card]})

    def post(self, path: str) -> None:
        if path != SCORES:
            self._refuse(path, MODELS)
        given = parsed(self.body())
        self.server.allow(self.connection, _SCORING_SECONDS)
        rewards = self.unfailing(partial(self.server.served.rewards, given))
        self.send(200, {"object": "scores", "model": self.server.served.name, "rewards": rewards})

    def _refuse(self, path: str, other: str) -> None:
        if path == other:
            self.refuse_method()
        raise RefusedRequest(f"there is no {path:.100}; this server has {SCORES} and {MODELS}", 404)


def load_served_reward(path: str, name: str, dtype: str | None, chat: ChatArguments) -> ServedReward:
    """Load a reward model, which reads texts in the style that was saved with it."""
    scorer = load_answer_scorer(path, dtype, DataArguments(chat=chat), start_alone())
    config = load_config(path)
    vocabulary = config.get_text_config().vocab_size
    return ServedReward(name, scorer, positions_of(config), vocabulary, tokenizer_digest(scorer.tokenizer))
