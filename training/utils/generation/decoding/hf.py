"""Rollouts with a transformers model and its key-value cache.

The decode loop computes each prompt once for all its samples, draws every row from its own random stream, records the
log-probability of each token as it is drawn, and drops rows from the batch once their responses have ended. On a GPU it
looks for ends every few tokens, so that the host does not wait for each.

B sequences, of which A are still active; P prompt tokens, R response tokens, t of them between two looks, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from training.utils.contracts.decode_loops import DecodeLoop
from training.utils.contracts.rollout import Response, Rollout, check_numbers
from training.utils.contracts.rollout_engine import (
    IN_ONE_PIECE,
    Decode,
    Drawing,
    RolloutEngine,
    RolloutRequest,
    RolloutSettings,
    Sampling,
)
from training.utils.generation.decoding.decode_check import fitting_way, why_not_in_parts
from training.utils.generation.decoding.decoding import WAYS, DecodeWay, Decoding, of_one_length
from training.utils.generation.decoding.drawn import DrawnResponses, stop_strings, uniform_streams
from training.utils.generation.decoding.sampling import draw
from training.utils.models.document_attention import share_keys_of_few_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.drawing import TurnDrawing, Turns
    from training.utils.contracts.guests import ExpertRecord, TokenLog
    from training.utils.contracts.lending import Lender
    from training.utils.models.own_forward import OwnForward

# On a GPU. A row computes up to this many tokens, less one, beyond its end.
_END_CHECK_TOKENS = 8


# Of a longer prompt, whose mask would be T x T; a batch of parts takes 4,096 x T.
PREFILL_TOKENS = 4096


class TransformersRollout(RolloutEngine):
    """See RolloutEngine. Unchecked, a model is decoded in the way that most families can (the first of WAYS), and turns
    by `roll_out`."""

    draws_forms = True
    takes_loops = True
    supports_media = True
    supports_rollouts_ahead = True
    records_experts = True
    launched_by_host = True
    _prefill_tokens: int | None = PREFILL_TOKENS  # that a forward reads of a longer prompt; None: all
    _longest_tokens: int | None = None  # of a prompt with its response
    _way: DecodeWay = WAYS[0]
    _experts: ExpertRecord | None = None
    _turns: TurnDrawing | None = None

    @classmethod
    def create(cls, decode: Decode | None, settings: RolloutSettings) -> TransformersRollout:
        engine = cls(decode)
        engine._longest_tokens = settings.longest_tokens
        return engine

    def __init__(self, decode: Decode | None = None) -> None:
        super().__init__(decode)
        self._loop = DecodeLoop()  # which draws by the engine's own

    def draw_by(self, loop: DecodeLoop) -> None:
        self._loop = loop

    def record_experts(self, record: ExpertRecord) -> None:
        self._experts = record

    @contextlib.contextmanager
    def lent(self, actor: Lender) -> Iterator[PreTrainedModel]:
        with super().lent(actor) as model, self._loop.lent():
            yield model

    def figures(self) -> dict[str, float]:
        return self._loop.figures()

    def state_dict(self) -> dict[str, Any]:
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._loop.load_state_dict(state)

    def check(
        self, lent: AbstractContextManager[PreTrainedModel], own: OwnForward, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        share_keys_of_few_tokens()
        with lent as model:
            self._way, notes = fitting_way(model, own)
            if self._experts is not None:
                self._way = self._experts.way(self._way, type(model).__name__)
            notes = [*notes, *self._check_parts(model, own)]
            with self._loop.lent():
                notes = [*notes, *self._loop.check(model, own, self._way)]
            if drawing.turns is not None:
                self._turns = drawing.turns
                notes = [*notes, *drawing.turns.check(model, own, self._way, self._why_by_roll_out())]
            if drawing.form is not None:
                drawing.form.check_model(model, self._way.masks_are_ours)
            return notes

    def _check_parts(self, model: PreTrainedModel, own: OwnForward) -> list[str]:
        """Read every prompt in one forward where its parts would give other numbers; return a sentence on that. Only
        where a prompt may be so long."""
        reason, most = None, self._prefill_tokens
        if most is not None and self._longest_tokens is not None and self._longest_tokens > most:
            reason = why_not_in_parts(model, own, self._way)
        if reason is not None:
            self._prefill_tokens = None
        self._loop.prefill_tokens = self._prefill_tokens
        if reason is None:
            return []
        name = type(model).__name__
        return [f"warning: {name} reads each prompt in one forward, instead of {most:,} tokens at a time: {reason}"]

    def _why_by_roll_out(self) -> str | None:
        """Return why turns are drawn by `roll_out`; None where they need not be."""
        if type(self).roll_out is not TransformersRollout.roll_out:
            return f"{type(self).__name__} has its own roll_out"
        return f"{self._loop.name} draws whole responses" if self._loop.name else None

    def turns_of(self, model: PreTrainedModel, sampling: Sampling) -> Turns | None:
        if self._turns is None:
            return None
        every = sampling.ends.check_tokens or end_check_tokens(model.device)
        return self._turns.open(model, sampling, stop_strings(sampling, self._decode), every)

    @torch.no_grad()
    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        started = time.perf_counter()
        if request.sampling.form is not None:
            rollout = request.sampling.form.draw(model, request)
        elif self._way.padded:
            stop = stop_strings(request.sampling, self._decode)
            rollout = self._loop.drawn(model, request, stop, partial(self._drawn, model, request))
        else:
            parts = [(rows, self._drawn(model, part)) for rows, part in of_one_length(request)]
            rollout = _together(request, parts)
        check_numbers(rollout.sampled_logprobs_BR, type(model).__name__)
        return replace(rollout, seconds=time.perf_counter() - started)

    def _drawn(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        if self._experts is None:
            return self._drawn_by_step(model, request)
        with self._experts.logged(model, request) as log:
            return log.added_to(self._drawn_by_step(model, request, log))

    def _drawn_by_step(self, model: PreTrainedModel, request: RolloutRequest, log: TokenLog | None = None) -> Rollout:
        sampling, device = request.sampling, request.prompt_ids_BP.device
        most, every = sampling.max_new_tokens, sampling.ends.check_tokens or end_check_tokens(device)
        decoding = Decoding(model, request, self._way, log, prefill_tokens=self._prefill_tokens)
        logits_AV = decoding.prefill(request.samples_per_prompt)
        drawn = DrawnResponses(request, stop_strings(sampling, self._decode))
        for start in range(0, most, every):
            end = min(start + every, most)
            token_A, over = drawn.advance(decoding, logits_AV, start, end)
            if end == most or all(over):
                break
            logits_AV = decoding.step(decoding.drop(token_A, over))
        return drawn.rollout()

    @torch.no_grad()
    def stream(self, model: PreTrainedModel, request: RolloutRequest, more_ends: Collection[int]) -> Iterator[int]:
        """As they are drawn, the tokens of a rollout with the same seed."""
        sampling, most = request.sampling, request.sampling.max_new_tokens
        ends = sampling.end_token_ids | set(more_ends)
        uniform_1R = uniform_streams(request.seeds, most, 1).to(request.prompt_ids_BP.device)
        decoding = Decoding(model, request, self._way, prefill_tokens=self._prefill_tokens)
        logits_1V = decoding.prefill(1)
        for t in range(most):
            token_1, logprob_1 = draw(logits_1V, uniform_1R[:, t], sampling)
            check_numbers(logprob_1.unsqueeze(1), type(model).__name__)
            token = int(token_1)
            yield token
            if token in ends or t + 1 == most:
                return
            logits_1V = decoding.step(token_1)


def _together(request: RolloutRequest, parts: Sequence[tuple[list[int], Rollout]]) -> Rollout:
    """Return one rollout of rollouts whose rows are those of `request` at the given indices."""
    responses = dict[int, Response]()
    for rows, part in parts:
        logprobs_BR = part.sampled_logprobs_BR.cpu()
        for place, (row, ended) in enumerate(zip(rows, part.ended_B.tolist(), strict=True)):
            ids = part.response_of(place).tolist()
            responses[row] = Response(ids, logprobs_BR[place, : len(ids)].tolist(), ended)
    ordered = [responses[row] for row in range(len(responses))]
    return Rollout.of_responses(request.repeated(), ordered, request.sampling.pad_token_id)


def end_check_tokens(device: torch.device) -> int:
    """Return after how many tokens a rollout looks at which responses have ended, by default. Asking a GPU makes the
    host wait until all tokens are computed; on a CPU it costs nothing."""
    return _END_CHECK_TOKENS if device.type == "cuda" else 1
