"""Rollouts by a transformers model and its key-value cache.

A decode loop of our own around the model's forward: it draws every row from a stream of its own, records the
log-probability of each token as it is drawn, and lets finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout.base import RolloutEngine, Sampling
from training.step3_ppo.rollout.sampling import draw

# Leaving copies the cache, so rows leave together, when they are this share of the batch.
_LEAVE_SHARE = 0.25


class TransformersRollout(RolloutEngine):
    """See RolloutEngine."""

    @torch.no_grad()
    def roll_out(
        self,
        model: PreTrainedModel,
        prompt_ids_BP: torch.Tensor,
        prompt_mask_BP: torch.Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Rollout:
        device = prompt_ids_BP.device
        count = prompt_ids_BP.shape[0]
        uniform_BR = _uniform_streams(seeds, sampling.max_new_tokens).to(device)
        response_ids_BR = torch.full((count, sampling.max_new_tokens), sampling.pad_token_id, device=device)
        logprobs_BR = torch.zeros(count, sampling.max_new_tokens, device=device)
        lengths_B = torch.zeros(count, dtype=torch.int64, device=device)
        ended_B = torch.zeros(count, dtype=torch.bool, device=device)

        state = _Decoding(model, prompt_ids_BP, prompt_mask_BP)
        for t in range(sampling.max_new_tokens):
            logits_AV = state.next_logits()
            alive_A = state.rows_A
            token_A, logprob_A = draw(logits_AV, uniform_BR[alive_A, t], sampling)
            open_A = ~ended_B[alive_A]
            response_ids_BR[alive_A, t] = torch.where(open_A, token_A, sampling.pad_token_id)
            logprobs_BR[alive_A, t] = torch.where(open_A, logprob_A, 0.0)
            lengths_B[alive_A] += open_A
            ended_B[alive_A] |= open_A & (token_A == sampling.end_token_id)
            open_A = ~ended_B[alive_A]
            if not bool(open_A.any()):
                break
            state.append(token_A)
            if float(open_A.float().mean()) <= 1.0 - _LEAVE_SHARE:
                state.keep(open_A)

        width = int(lengths_B.max())
        return Rollout(
            prompt_ids_BP=prompt_ids_BP,
            prompt_mask_BP=prompt_mask_BP,
            response_ids_BR=response_ids_BR[:, :width],
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=logprobs_BR[:, :width],
            ended_B=ended_B,
        )


class _Decoding:
    """The rows still in the batch (A of B), their cache, mask and next input."""

    def __init__(self, model: PreTrainedModel, prompt_ids_BP: torch.Tensor, prompt_mask_BP: torch.Tensor) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.rows_A = torch.arange(prompt_ids_BP.shape[0], device=prompt_ids_BP.device)
        self.input_ids = prompt_ids_BP
        self.mask = prompt_mask_BP.long()
        self.position_ids = (self.mask.cumsum(-1) - 1).clamp(min=0)

    def next_logits(self) -> torch.Tensor:
        output = self.model(
            input_ids=self.input_ids,
            attention_mask=self.mask,
            position_ids=self.position_ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def append(self, token_A: torch.Tensor) -> None:
        self.input_ids = token_A.unsqueeze(1)
        self.mask = torch.cat([self.mask, torch.ones_like(self.input_ids)], dim=1)
        self.position_ids = self.position_ids[:, -1:] + 1

    def keep(self, chosen_A: torch.Tensor) -> None:
        indices = torch.nonzero(chosen_A).flatten()
        self.cache.batch_select_indices(indices)
        self.rows_A = self.rows_A[indices]
        self.input_ids, self.mask, self.position_ids = (
            part[indices] for part in (self.input_ids, self.mask, self.position_ids)
        )


def _uniform_streams(seeds: Sequence[int], count: int) -> torch.Tensor:
    """float64 [B, count] in [0, 1): each row from its own seed, on the CPU, so that every device draws alike."""
    streams = [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(streams)
