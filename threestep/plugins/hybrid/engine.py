"""Rollouts with DeepSpeed's engine, deepspeed.runtime.rollout (DeepSpeed 0.19). Serves `--rollout_engine hybrid`.

That engine calls transformers' `generate` for the maximum number of steps, even if all responses have ended, and
returns only tokens. This file adds the log-probabilities, by one training forward afterwards, and cuts responses at
their end. Responses depend on the batch: DeepSpeed draws from torch's global generator, which is seeded from all seeds
of the batch. The engine is lent whole weights at any ZeRO stage; the kernels that DeepSpeed's hybrid engine injects
into a few old architectures on GPUs are not used.

B sequences, P prompt tokens, R response tokens, M response tokens of some sequences.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedModel

from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rollout import Response, Rollout, check_numbers
from training.utils.contracts.rollout_engine import (
    IN_ONE_PIECE,
    Decode,
    Drawing,
    RolloutEngine,
    RolloutRequest,
    Sampling,
)
from training.utils.generation.decoding.decode_check import why_not_decoded
from training.utils.generation.decoding.decoding import WAYS
from training.utils.generation.decoding.drawn import StopStrings, first_completed, stop_strings
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel, Readout

if TYPE_CHECKING:
    from training.utils.models.own_forward import OwnForward

# Sequences per forward that reads log-probabilities.
_FORWARD_SEQUENCES = 8


class HybridRollout(RolloutEngine):
    """See RolloutEngine. Only the same batch with the same seeds gets the same responses."""

    supports_min_p = False
    supports_bad_words = False
    supports_environment = False
    for_training_only = True
    launched_by_host = True

    def __init__(self, decode: Decode | None = None) -> None:
        try:
            from deepspeed.runtime import rollout
        except ImportError as error:
            raise ThreestepError(
                "--rollout_engine hybrid needs a DeepSpeed version with deepspeed.runtime.rollout (0.19 or later), "
                f"which is missing here ({error}); install one, or use --rollout_engine hf"
            ) from None
        super().__init__(decode)
        self._deepspeed = rollout

    def check(
        self, lent: AbstractContextManager[PreTrainedModel], own: OwnForward, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        with lent as model:
            reason = why_not_decoded(model, own, WAYS[1])
        if reason is not None:
            raise ThreestepError(
                f"--rollout_engine hybrid uses transformers' generate, which decodes {WAYS[1].words}, but "
                f"{type(model).__name__} cannot: {reason}; use --rollout_engine hf"
            )
        return []

    @torch.no_grad()
    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        sampling = request.sampling
        assert not (sampling.min_p or sampling.bad_words), "rejected when the flags are checked"
        started = time.perf_counter()
        generated_BT = self._generated(model, request)
        prompts, stop = request.repeated(), stop_strings(sampling, self._decode)
        drawn = generated_BT[:, prompts[0].shape[1] :].tolist()
        cut = [_cut(ids, sampling.end_token_ids, stop) for ids in drawn]
        responses = [
            Response(ids[:length], [0.0] * length, ended) for ids, (length, ended) in zip(drawn, cut, strict=True)
        ]
        rollout = Rollout.of_responses(prompts, responses, sampling.pad_token_id)
        rollout.sampled_logprobs_BR[rollout.response_mask_BR] = _logprobs(model, rollout, sampling)
        check_numbers(rollout.sampled_logprobs_BR, type(model).__name__)
        return replace(rollout, seconds=time.perf_counter() - started)

    def _generated(self, model: PreTrainedModel, request: RolloutRequest) -> torch.Tensor:
        """Return int64 [B, P + R], with arbitrary tokens after a response's end."""
        theirs, sampling, prompt_ids_BP = self._deepspeed, request.sampling, request.prompt_ids_BP
        tokens = SimpleNamespace(pad_token_id=sampling.pad_token_id, eos_token_id=sampling.end_token_id)
        prompts = theirs.RolloutRequest(prompt_ids_BP, request.prompt_mask_BP.long())
        config = theirs.SamplingConfig(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            n_samples_per_prompt=request.samples_per_prompt,
        )
        engine = theirs.HybridEngineRollout(SimpleNamespace(module=model), tokens)
        device, seeds = prompt_ids_BP.device, request.seeds
        # `generate` falls back to the checkpoint's sampling settings.
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(derived_seed(seeds[0], "hybrid", *seeds))
                return engine.generate(prompts, config).input_ids
        finally:
            model.generation_config = own


def _cut(response_ids: list[int], ends: Collection[int], stop: StopStrings | None) -> tuple[int, bool]:
    """Return the response's length, and whether it ended before the limit."""
    end = next((place for place, token in enumerate(response_ids) if token in ends), len(response_ids))
    ended = end < len(response_ids)
    response_ids = response_ids[: end + 1]
    stopped = first_completed(stop, response_ids) if stop is not None else None
    return (len(response_ids), ended) if stopped is None else (stopped, True)


def _logprobs(model: PreTrainedModel, rollout: Rollout, sampling: Sampling) -> torch.Tensor:
    """Return float32 [M], those of all response tokens in order, from the training forward."""
    policy, device = PolicyModel(model), rollout.prompt_ids_BP.device
    sequences = rollout.sequences()
    parts = []
    for start in range(0, len(sequences), _FORWARD_SEQUENCES):
        rows = padded_rows(sequences[start : start + _FORWARD_SEQUENCES], sampling.pad_token_id).to(device)
        parts.append(policy(rows, Readout(sampling.temperature or 1.0)).logprobs_M)
    return torch.cat(parts)
