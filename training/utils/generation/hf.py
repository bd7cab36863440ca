"""Rollouts with a transformers model and its key-value cache.

The decode loop computes each prompt once for all its samples, draws every row from its own random stream, records the
log-probability of each token as it is drawn, and drops a row from the batch as soon as its response has ended.

B sequences (prompts, until they are repeated), of which A are still active; P prompt tokens, R response tokens,
V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from training.utils.generation.bad_words import BadWords
from training.utils.generation.base import RolloutEngine, RolloutRequest
from training.utils.generation.cache import compacted, leave, moves_when_leaving, reorder, roomy_cache
from training.utils.generation.records import Rollout
from training.utils.generation.sampling import draw
from training.utils.generation.stop_strings import StopStrings, stop_strings


class TransformersRollout(RolloutEngine):
    @torch.no_grad()
    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        started = time.perf_counter()
        sampling, device = request.sampling, request.prompt_ids_BP.device
        most = sampling.max_new_tokens
        decoding = Decoding(model, request)
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
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def stream(self, model: PreTrainedModel, request: RolloutRequest, more_ends: Collection[int]) -> Iterator[int]:
        """As they are drawn, the tokens of a rollout with the same seed."""
        sampling, most = request.sampling, request.sampling.max_new_tokens
        ends = {sampling.end_token_id, *more_ends}
        uniform_1R = uniform_streams(request.seeds, most, 1).to(request.prompt_ids_BP.device)
        decoding = Decoding(model, request)
        logits_1V = decoding.prefill(1)
        for t in range(most):
            token_1, _ = draw(logits_1V, uniform_1R[:, t], sampling)
            token = int(token_1)
            yield token
            if token in ends or t + 1 == most:
                return
            logits_1V = decoding.step(token_1)


class Decoding:
    """The active rows: their indices in B, cache, mask and last position."""

    def __init__(self, model: PreTrainedModel, request: RolloutRequest) -> None:
        most, prompt_mask_BP = request.sampling.max_new_tokens, request.prompt_mask_BP
        count, self.length = prompt_mask_BP.shape
        self.model = model
        # Pure state-space models name the cache differently, and silently ignore any other name.
        self.is_state_space = "cache_params" in inspect.signature(model.forward).parameters
        self.cache = roomy_cache(model, self.length + most)
        self.input_ids = request.prompt_ids_BP
        self.mask = torch.nn.functional.pad(prompt_mask_BP.long(), (0, most), value=1)
        self.position_ids = (self.mask[:, : self.length].cumsum(-1) - 1).clamp(min=0)
        self.rows_A = torch.arange(count, device=prompt_mask_BP.device)

    def prefill(self, samples_per_prompt: int) -> torch.Tensor:
        """Compute each prompt once, then give each sample a row; return the logits [A, V] of the first tokens."""
        logits_BV = self._forward()
        self.position_ids = self.position_ids[:, -1:]
        if samples_per_prompt == 1:
            return logits_BV
        order = self.rows_A.repeat_interleave(samples_per_prompt)
        reorder(self.cache, order)
        self.mask, self.position_ids = self.mask[order], self.position_ids[order]
        self.rows_A = torch.arange(len(order), device=order.device)
        return logits_BV[order]

    def drop(self, token_A: torch.Tensor, over: list[bool]) -> torch.Tensor:
        """Drop the rows that are over; return the tokens of the others in their new order."""
        if not any(over):
            return token_A
        moves = moves_when_leaving(over, token_A.device)
        if moves.count:
            leave(self.cache, moves)
        self.mask, self.position_ids, self.rows_A = (
            compacted(part, moves) for part in (self.mask, self.position_ids, self.rows_A)
        )
        return compacted(token_A, moves)

    def step(self, token_A: torch.Tensor) -> torch.Tensor:
        """Append one token to each row; return the logits [A, V] of the next."""
        self.input_ids = token_A.unsqueeze(1)
        self.position_ids = self.position_ids + 1
        self.length += 1
        return self._forward()

    def _forward(self) -> torch.Tensor:
        prompts_are_in = self.input_ids.shape[1] < self.length
        inputs = {
            "input_ids": self.input_ids,
            # Their state holds the past; they would multiply the whole mask with the single new token.
            "attention_mask": None if self.is_state_space and prompts_are_in else self.mask[:, : self.length],
            "position_ids": self.position_ids,
            "cache_params" if self.is_state_space else "past_key_values": self.cache,
        }
        return self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()


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
