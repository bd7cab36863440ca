"""Turns as requests of `/inference/v1/generate`, and its answers as turns, each looked at before it is believed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.vllm.servers.client import ServerFailure
from training.utils.contracts.drawing import DrawnTurn, NextTurn

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.generation.decoding.drawn import StopStrings

GENERATE = "/inference/v1/generate"
# Log-probabilities of float32 may round to a little more than 0. Servers write -9999 in the place of NaN and of
# probabilities of 0 (vllm 0.32, token_in_token_out/serving.py).
_MOST, _LEAST = 1e-3, -9998.0
_FIRST_VERSION = "default"  # of a server that was sent no weights (vllm 0.32, v1/engine/core.py)


@dataclass(frozen=True)
class RequestSettings:
    """Settings of the requests of a rollout.

    version: of the weights that draw. model: the name that requests give; None for the server's own weights.
    vocabulary: tokens that the model can draw. stop: None without stop strings. experts: come with each response.
    """

    sampling: Sampling
    version: str
    vocabulary: int
    stop: StopStrings | None = None
    model: str | None = None
    experts: bool = False


def request_of(turn: NextTurn, asked: RequestSettings, name: str | None = None) -> dict[str, Any]:
    """Return the body of a request; the same settings and seed as those of the engine that runs beside training.
    name: of a request whose experts are recorded: every token of it is computed, and none found in the prefix cache.
    """
    sampling = asked.sampling
    ends = sorted(token for token in sampling.end_token_ids if 0 <= token < asked.vocabulary)
    body: dict[str, Any] = {
        "token_ids": list(turn.ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": turn.seed % 2**63,
            "max_tokens": turn.most_tokens,
            "stop_token_ids": ends,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        },
    }
    if asked.model is not None:
        body["model"] = asked.model
    if asked.stop is not None:
        body["stream"] = True
    if name is not None:
        body |= {"request_id": name, "cache_salt": name}
    return body


def turn_of(turn: NextTurn, asked: RequestSettings, parts: Iterable[Any]) -> DrawnTurn:
    """Return what the parts of an answer say, up to the token that completes a stop string. ServerFailure if it is not
    an answer to this request."""
    ids, logprobs, reason = list[int](), list[float](), None
    for part in parts:
        choice = _choice(part)
        _check_versions(choice, asked.version)
        reason = choice.get("finish_reason")
        for token, logprob in _tokens(choice):
            _check_token(token, logprob, asked.vocabulary)
            ids.append(token)
            logprobs.append(min(logprob, 0.0))
            if asked.stop is not None and asked.stop.completed(ids):
                return DrawnTurn(turn.key, ids, logprobs, ended=True)
    _check_end(ids, reason, turn, asked.sampling)
    return DrawnTurn(turn.key, ids, logprobs, ended=reason == "stop")


def _choice(part: Any) -> Mapping[str, Any]:
    choices = part.get("choices") if isinstance(part, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise ServerFailure("its answer contains no response")
    return choices[0]


def _tokens(choice: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    ids = choice.get("token_ids") or []
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    if len(ids) != len(logprobs):
        raise ServerFailure(f"it returned {len(ids)} tokens but {len(logprobs)} log-probabilities")
    return [(token, own.get("logprob")) for token, own in zip(ids, logprobs, strict=True)]


def _check_token(token: Any, logprob: Any, vocabulary: int) -> None:
    if not (isinstance(token, int) and 0 <= token < vocabulary):
        raise ServerFailure(f"it generated the token {token!r}, but the model only has tokens below {vocabulary}")
    if not (isinstance(logprob, (int, float)) and math.isfinite(logprob) and _LEAST < logprob < _MOST):
        raise ServerFailure(f"it returned the log-probability {logprob!r} (servers write -9999 for NaN)")


def _check_versions(choice: Mapping[str, Any], version: str) -> None:
    drew = {span.get("version") for span in choice.get("weight_versions") or []}
    if _FIRST_VERSION in drew:
        raise ServerFailure("it was restarted and does not have the weights", is_passing=True)
    if drew - {version}:
        raise ServerFailure("it generated with different weights from those it was sent")


def _check_end(ids: list[int], reason: Any, turn: NextTurn, sampling: Sampling) -> None:
    ends, most = sampling.end_token_ids, turn.most_tokens
    begun = next((place for place, token in enumerate(ids) if token in ends), None)
    if reason == "stop" and begun is not None and begun == len(ids) - 1:
        return
    if reason == "length" and len(ids) == most and begun is None:
        return
    raise ServerFailure(
        f"it returned {len(ids)} tokens and the finish reason '{reason}', but a response must end with an end "
        f"token or after {most} tokens"
    )
