"""Rollouts by a transformers model and its key-value cache.

A decode loop of our own around the model's forward: it computes a prompt once for all its samples, draws every row from
a stream of its own, records the log-probability of each token as it is drawn, and lets a row leave the batch as soon as
its response has ended.

B sequences (prompts, until they are repeated), of which A are still being written; P prompt tokens, R response tokens,
V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout.bad_words import BadWords
from training.step3_ppo.rollout.base import Decode, RolloutEngine, Sampling, repeated
from training.step3_ppo.rollout.cache import closed_up, leave, moves_when_leaving, reorder, roomy_cache
from training.step3_ppo.rollout.sampling import draw
from training.step3_ppo.rollout.stop_strings import StopStrings, stop_strings


class TransformersRollout(RolloutEngine):
    """See RolloutEngine. decode: needed where Sampling has stop strings."""

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode

    @torch.no_grad()
    def roll_out(
        self,
        model: PreTrainedModel,
        prompt_ids_BP: torch.Tensor,
        prompt_mask_BP: torch.Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
        samples_per_prompt: int = 1,
    ) -> Rollout:
        started = time.perf_counter()
        device, most = prompt_ids_BP.device, sampling.max_new_tokens
        decoding = Decoding(model, prompt_ids_BP, prompt_mask_BP, most)
        logits_AV = decoding.prefill(samples_per_prompt)
        prompt_ids_BP, prompt_mask_BP = repeated(prompt_ids_BP, prompt_mask_BP, samples_per_prompt)
        bad_words = BadWords(sampling.bad_words, prompt_ids_BP, prompt_mask_BP) if sampling.bad_words else None
        stop = stop_strings(sampling, self._decode)

        count = len(prompt_ids_BP)
        uniform_BR = uniform_streams(seeds, most, count).to(device)
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
            token_A = decoding.go_on(token_A, over_A.tolist())
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


class Decoding:
    """The rows still in the batch: which of B they are, their cache, mask and last position."""

    def __init__(
        self, model: PreTrainedModel, prompt_ids_BP: torch.Tensor, prompt_mask_BP: torch.Tensor, most: int
    ) -> None:
        count, self.length = prompt_ids_BP.shape
        self.model = model
        # Pure state-space models have a name of their own for the cache, and take any other silently for nothing.
        self.is_state_space = "cache_params" in inspect.signature(model.forward).parameters
        self.cache = roomy_cache(model, self.length + most)
        self.input_ids = prompt_ids_BP
        response_mask = prompt_mask_BP.new_ones(count, most)
        self.mask = torch.cat([prompt_mask_BP, response_mask], dim=1).long()
        self.position_ids = (self.mask[:, : self.length].cumsum(-1) - 1).clamp(min=0)
        self.rows_A = torch.arange(count, device=prompt_ids_BP.device)

    def prefill(self, samples_per_prompt: int) -> torch.Tensor:
        """Compute each prompt once, then give it a row a sample; return the logits [A, V] of the first tokens."""
        logits_BV = self._forward()
        self.position_ids = self.position_ids[:, -1:]
        if samples_per_prompt == 1:
            return logits_BV
        order = self.rows_A.repeat_interleave(samples_per_prompt)
        reorder(self.cache, order)
        self.mask, self.position_ids = self.mask[order], self.position_ids[order]
        self.rows_A = torch.arange(len(order), device=order.device)
        return logits_BV[order]

    def go_on(self, token_A: torch.Tensor, over: list[bool]) -> torch.Tensor:
        """Let the rows that are over leave; return the tokens of those that stay, in their new order."""
        if not any(over):
            return token_A
        moves = moves_when_leaving(over, token_A.device)
        if moves.count:
            leave(self.cache, moves)
        self.mask, self.position_ids, self.rows_A = (
            closed_up(part, moves) for part in (self.mask, self.position_ids, self.rows_A)
        )
        return closed_up(token_A, moves)

    def step(self, token_A: torch.Tensor) -> torch.Tensor:
        """Return the logits [A, V] of what follows one more token a row."""
        self.input_ids = token_A.unsqueeze(1)
        self.position_ids = self.position_ids + 1
        self.length += 1
        return self._forward()

    def _forward(self) -> torch.Tensor:
        prompts_are_in = self.input_ids.shape[1] < self.length
        inputs = {
            "input_ids": self.input_ids,
            # Their state holds the past, and they would multiply the mask of all with the token that is new.
            "attention_mask": None if self.is_state_space and prompts_are_in else self.mask[:, : self.length],
            "position_ids": self.position_ids,
            "cache_params" if self.is_state_space else "past_key_values": self.cache,
        }
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()


def _completed(
    stop: StopStrings, token_A: torch.Tensor, response_ids_BR: torch.Tensor, rows_A: torch.Tensor
) -> torch.Tensor:
    """Return bool [A], True where the token just drawn completes a stop string."""
    asked = [place for place, token in enumerate(token_A.tolist()) if stop.can_complete(token)]
    completed_A = torch.zeros_like(rows_A, dtype=torch.bool)
    if asked:
        texts = response_ids_BR[rows_A[asked]].tolist()
        completed_A[asked] = torch.tensor([stop.completed(ids) for ids in texts], device=rows_A.device)
    return completed_A


def uniform_streams(seeds: Sequence[int], tokens: int, count: int) -> torch.Tensor:
    """float64 [B, tokens] in [0, 1): each row from its own seed, on the CPU, so that every device draws alike."""
    assert len(seeds) == count, f"{count} sequences want as many seeds, got {len(seeds)}"
    streams = [torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(streams)
