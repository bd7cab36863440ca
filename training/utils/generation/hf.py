"""Rollouts with a transformers model and its key-value cache.

The decode loop computes each prompt once for all its samples, draws every row from its own random stream, records the
log-probability of each token as it is drawn, and drops a row from the batch as soon as its response has ended.

B sequences, of which A are still active; P prompt tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from training.utils.generation.bad_words import BadWords
from training.utils.generation.base import RolloutEngine, RolloutRequest
from training.utils.generation.decode_check import fitting_way
from training.utils.generation.decoding import WAYS, DecodeWay, Decoding, of_one_length
from training.utils.generation.records import Rollout, check_numbers
from training.utils.generation.sampling import draw
from training.utils.generation.stop_strings import StopStrings, stop_strings
from training.utils.models.own_forward import OwnForward


class TransformersRollout(RolloutEngine):
    """See RolloutEngine. Unchecked, a model is decoded in the way that most families can (the first of WAYS)."""

    _way: DecodeWay = WAYS[0]

    def check(self, lent: AbstractContextManager[PreTrainedModel], own: OwnForward) -> list[str]:
        with lent as model:
            self._way, notes = fitting_way(model, own)
        return notes

    @torch.no_grad()
    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        started = time.perf_counter()
        if self._way.padded:
            rollout = self._drawn(model, request)
        else:
            parts = [(rows, self._drawn(model, part)) for rows, part in of_one_length(request)]
            rollout = _together(request, parts)
        check_numbers(rollout.sampled_logprobs_BR, type(model).__name__)
        return replace(rollout, seconds=time.perf_counter() - started)

    def _drawn(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        sampling, device = request.sampling, request.prompt_ids_BP.device
        most = sampling.max_new_tokens
        decoding = Decoding(model, request, self._way)
        logits_AV = decoding.prefill(request.samples_per_prompt)
        prompt_ids_BP, prompt_mask_BP = request.repeated()
        bad_words = BadWords(sampling.bad_words, prompt_ids_BP, prompt_mask_BP) if sampling.bad_words else None
        stop = stop_strings(sampling, self._decode)

        count = len(prompt_ids_BP)
        uniform_BR = uniform_streams(request.seeds, most, count).to(device)
        response_ids_BR = torch.full((count, most), sampling.pad_token_id, device=device)
        logprobs_BR = torch.zeros(count, most, device=device)
        lengths_B = torch.zeros(count, dtype=torch.int64, device=device)
        ended_B = torch.zeros(count, dtype=torch.bool, device=device)
        for t in range(most):
            rows_A = decoding.rows_A
            banned_AV = bad_words.banned(response_ids_BR[:, :t], rows_A, logits_AV.shape[1]) if bad_words else None
            token_A, logprob_A = draw(logits_AV, uniform_BR[rows_A, t], sampling, banned_AV)
            response_ids_BR[rows_A, t] = token_A
            logprobs_BR[rows_A, t] = logprob_A
            lengths_B[rows_A] = t + 1
            over_A = token_A == sampling.end_token_id
            if stop is not None:
                over_A |= _completed(stop, token_A, response_ids_BR[:, : t + 1], rows_A)
            ended_B[rows_A] = over_A
            token_A = decoding.drop(token_A, over_A.tolist())
            if t + 1 == most or len(token_A) == 0:
                break
            logits_AV = decoding.step(token_A)

        width = int(lengths_B.max())
        return Rollout(
            prompt_ids_BP=prompt_ids_BP,
            prompt_mask_BP=prompt_mask_BP,
            response_ids_BR=response_ids_BR[:, :width],
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=logprobs_BR[:, :width],
            ended_B=ended_B,
        )

    @torch.no_grad()
    def stream(self, model: PreTrainedModel, request: RolloutRequest, more_ends: Collection[int]) -> Iterator[int]:
        """As they are drawn, the tokens of a rollout with the same seed."""
        sampling, most = request.sampling, request.sampling.max_new_tokens
        ends = {sampling.end_token_id, *more_ends}
        uniform_1R = uniform_streams(request.seeds, most, 1).to(request.prompt_ids_BP.device)
        decoding = Decoding(model, request, self._way)
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
    prompt_ids_BP, prompt_mask_BP = request.repeated()
    count, width = len(prompt_ids_BP), max(part.response_ids_BR.shape[1] for _, part in parts)
    device, pad = prompt_ids_BP.device, request.sampling.pad_token_id
    whole = Rollout(
        prompt_ids_BP=prompt_ids_BP,
        prompt_mask_BP=prompt_mask_BP,
        response_ids_BR=torch.full((count, width), pad, device=device),
        response_lengths_B=torch.zeros(count, dtype=torch.int64, device=device),
        sampled_logprobs_BR=torch.zeros(count, width, device=device),
        ended_B=torch.zeros(count, dtype=torch.bool, device=device),
    )
    for rows, part in parts:
        columns = part.response_ids_BR.shape[1]
        whole.response_ids_BR[rows, :columns] = part.response_ids_BR
        whole.sampled_logprobs_BR[rows, :columns] = part.sampled_logprobs_BR
        whole.response_lengths_B[rows] = part.response_lengths_B
        whole.ended_B[rows] = part.ended_B
    return whole


def _completed(
    stop: StopStrings, token_A: torch.Tensor, response_ids_BR: torch.Tensor, rows_A: torch.Tensor
) -> torch.Tensor:
    """Return bool [A], True if the token just drawn completes a stop string."""
    candidates = [place for place, token in enumerate(token_A.tolist()) if stop.can_complete(token)]
    completed_A = torch.zeros_like(rows_A, dtype=torch.bool)
    if candidates:
        texts = response_ids_BR[rows_A[candidates]].tolist()
        completed_A[candidates] = torch.tensor([stop.completed(ids) for ids in texts], device=rows_A.device)
    return completed_A


def uniform_streams(seeds: Sequence[int], tokens: int, count: int) -> torch.Tensor:
    """float64 [B, tokens] in [0, 1): each row from its own seed, on the CPU, so that all devices draw the same."""
    assert len(seeds) == count, f"{count} sequences need {count} seeds, got {len(seeds)}"
    streams = [torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(streams)
