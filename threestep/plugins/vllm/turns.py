"""Requests of vLLM while they are drawn: responses of a rollout, or turns of conversations.

Each is a request of its own, with its own seed and limit. vLLM batches those that are there at each step; what a
conversation had before, in whole blocks of the cache, it finds there by its tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from threestep.plugins.vllm.images import engine_prompt
from threestep.plugins.vllm.instance import VllmInstance, vllm_at_work
from training.utils.base.errors import ThreestepError
from training.utils.contracts.drawing import DrawnTurn, NextTurn, Turns

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.generation.decoding.drawn import StopStrings


@dataclass
class VllmResponse:
    """The tokens of a turn that are drawn so far."""

    turn: NextTurn
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class VllmTurns(Turns):
    """See Turns. One at a time: it begins with an empty cache, so that no rollout depends on earlier ones, and older
    weights leave nothing behind."""

    def __init__(self, vllm: VllmInstance, sampling: Sampling, stop: StopStrings | None) -> None:
        self._vllm, self._sampling, self._stop = vllm, sampling, stop
        self._count = 0
        self._of_name: dict[str, VllmResponse] = {}
        with vllm_at_work():
            vllm.forget_prompts()
            vllm.set_temperature(sampling.temperature)

    @property
    def is_drawing(self) -> bool:
        return bool(self._of_name)

    def add(self, turn: NextTurn) -> None:
        name = str(self._count)
        self._count += 1
        self._of_name[name] = VllmResponse(turn)
        with vllm_at_work():
            engine = self._vllm.llm.llm_engine
            add_request(engine, name, turn, self._sampling, token_by_token=self._stop is not None)

    def advance(self) -> list[DrawnTurn]:
        engine, over, stopped = self._vllm.llm.llm_engine, list[DrawnTurn](), list[str]()
        self.steps += 1
        with vllm_at_work():
            for output in engine.step():
                response = self._of_name.get(output.request_id)
                if response is None:
                    continue  # drawn before the engine processed the abort
                extend(response, output.outputs[0], self._stop)
                if response.ended and not output.finished:
                    stopped.append(output.request_id)
                if response.ended or output.finished:
                    check_prompt(output, response.turn)
                    del self._of_name[output.request_id]
                    experts_TLK = self._vllm.experts_of(output.request_id, output.outputs[0])
                    drawn = response.ids, response.logprobs, response.ended, experts_TLK
                    over.append(DrawnTurn(response.turn.key, *drawn))
            if stopped:
                engine.abort_request(stopped)
        return over

    def close(self) -> None:
        if self._of_name:
            self._vllm.llm.llm_engine.abort_request(list(self._of_name))


def add_request(
    engine: Any,
    name: str,
    turn: NextTurn,
    sampling: Sampling,
    *,
    token_by_token: bool,
    more_ends: Collection[int] = (),
) -> None:
    """Add a request to vLLM's engine. token_by_token: its tokens come as they are drawn. more_ends: tokens."""
    vocabulary = engine.model_config.get_vocab_size()
    # vLLM rejects end tokens that no model can draw.
    ends = [token for token in sorted(sampling.end_token_ids.union(more_ends)) if 0 <= token < vocabulary]
    params = _sampling_params(turn, sampling, ends, token_by_token)
    model_type = engine.model_config.hf_config.model_type
    engine.add_request(name, engine_prompt(model_type, turn.ids, turn.media), params)


def check_prompt(output: Any, turn: NextTurn) -> None:
    """ThreestepError if vLLM read other tokens than those of the turn. output: vllm.RequestOutput."""
    if list(output.prompt_token_ids) != list(turn.ids):
        raise ThreestepError(
            f"vLLM encoded a prompt of {len(turn.ids)} tokens as {len(output.prompt_token_ids)}: it processes "
            "images differently from training; use --rollout_engine hf"
        )


def _sampling_params(turn: NextTurn, sampling: Sampling, end_token_ids: list[int], token_by_token: bool) -> Any:
    """vLLM's SamplingParams. The temperature is already in the logits."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=turn.seed % 2**63,
        max_tokens=turn.most_tokens,
        stop_token_ids=end_token_ids,
        ignore_eos=True,  # only our end tokens end a response
        detokenize=False,
        logprobs=0,  # the drawn token's
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if token_by_token else RequestOutputKind.FINAL_ONLY,
    )
    if sampling.bad_words:  # the public field takes texts and needs a tokenizer, which vLLM does not have here
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return params


def extend(response: VllmResponse, part: Any, stop: StopStrings | None) -> None:
    """Add vLLM's `part` (CompletionOutput), up to the token that completes a stop string."""
    for token, logprob in zip(part.token_ids, part.logprobs.logprobs, strict=True):
        response.ids.append(token)
        response.logprobs.append(logprob)
        if stop is not None and stop.completed(response.ids):
            response.ended = True
            return
    response.ended = part.finish_reason == "stop"
