"""Rollouts by DeepSpeed's own engine, deepspeed.runtime.rollout (DeepSpeed 0.19).

That engine calls transformers' `generate` with as many steps as a response may have, whatever has ended, and gives back
tokens alone. So this file adds what it lacks: the log-probabilities come from one forward of the training kind
afterwards, and responses are cut at their end. A response here depends on its batch: DeepSpeed draws from the global
generator of torch, which is seeded with all of the batch's seeds. It is lent whole weights, at any ZeRO stage; the
kernels that DeepSpeed's hybrid engine puts into a few old architectures on GPUs are not used.

B sequences, P prompt tokens, R response tokens, M response tokens of some sequences.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from transformers import GenerationConfig, PreTrainedModel

from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout.base import Decode, RolloutEngine, Sampling, repeated
from training.step3_ppo.rollout.stop_strings import StopStrings, first_completed, stop_strings
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel
from training.utils.run.errors import ThreestepError
from training.utils.run.seeds import derived_seed

# Sequences of one forward that reads log-probabilities.
_FORWARD_SEQUENCES = 8


class HybridRollout(RolloutEngine):
    """See RolloutEngine, but for seeds: the same batch with the same seeds gets the same responses, no more."""

    def __init__(self, decode: Decode | None = None) -> None:
        try:
            from deepspeed.runtime import rollout
        except ImportError as error:
            raise ThreestepError(
                "--rollout_engine hybrid expects a DeepSpeed with deepspeed.runtime.rollout (0.19 has it), and this "
                f"one lacks it ({error}); install that, or leave --rollout_engine at hf"
            ) from None
        self._deepspeed = rollout
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
        assert not (sampling.min_p or sampling.bad_words), "refused by the flags"
        started = time.perf_counter()
        generated_BT = self._generated(model, prompt_ids_BP, prompt_mask_BP, sampling, seeds, samples_per_prompt)
        prompt_ids_BP, prompt_mask_BP = repeated(prompt_ids_BP, prompt_mask_BP, samples_per_prompt)
        stop = stop_strings(sampling, self._decode)
        cut = [_cut(row, sampling.end_token_id, stop) for row in generated_BT[:, prompt_ids_BP.shape[1] :].tolist()]

        device, width = prompt_ids_BP.device, max(length for length, _ in cut)
        lengths_B = torch.tensor([length for length, _ in cut], device=device)
        response_mask_BR = torch.arange(width, device=device) < lengths_B.unsqueeze(1)
        response_ids_BR = generated_BT[:, prompt_ids_BP.shape[1] :][:, :width]
        rollout = Rollout(
            prompt_ids_BP=prompt_ids_BP,
            prompt_mask_BP=prompt_mask_BP,
            response_ids_BR=response_ids_BR.masked_fill(~response_mask_BR, sampling.pad_token_id),
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=torch.zeros(response_mask_BR.shape, device=device),
            ended_B=torch.tensor([ended for _, ended in cut], device=device),
        )
        rollout.sampled_logprobs_BR[response_mask_BR] = _logprobs(model, rollout, sampling)
        return replace(rollout, seconds=time.perf_counter() - started)

    def _generated(
        self,
        model: PreTrainedModel,
        prompt_ids_BP: torch.Tensor,
        prompt_mask_BP: torch.Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
        samples_per_prompt: int,
    ) -> torch.Tensor:
        """Return int64 [B, P + R], whatever stands behind a response's end."""
        theirs = self._deepspeed
        tokens = SimpleNamespace(pad_token_id=sampling.pad_token_id, eos_token_id=sampling.end_token_id)
        request = theirs.RolloutRequest(prompt_ids_BP, prompt_mask_BP.long())
        how = theirs.SamplingConfig(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            n_samples_per_prompt=samples_per_prompt,
        )
        engine = theirs.HybridEngineRollout(SimpleNamespace(module=model), tokens)
        with _generation_settings_aside(model), _seeded(seeds, prompt_ids_BP.device):
            return engine.generate(request, how).input_ids


@contextlib.contextmanager
def _generation_settings_aside(model: PreTrainedModel) -> Iterator[None]:
    """`generate` reads what the checkpoint says of sampling wherever it is told nothing; here it says nothing."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def _seeded(seeds: Sequence[int], device: torch.device) -> Iterator[None]:
    """torch's global generators seeded inside, and as they were after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(seeds[0], "hybrid", *seeds))
        yield


def _cut(response_ids: list[int], end_token_id: int, stop: StopStrings | None) -> tuple[int, bool]:
    """Return the response's length, and whether it ended by itself."""
    if end_token_id in response_ids:
        response_ids = response_ids[: response_ids.index(end_token_id) + 1]
    ended = response_ids[-1] == end_token_id
    stopped = first_completed(stop, response_ids) if stop is not None else None
    return (len(response_ids), ended) if stopped is None else (stopped, True)


def _logprobs(model: PreTrainedModel, rollout: Rollout, sampling: Sampling) -> torch.Tensor:
    """Return float32 [M], of all response tokens one after the other, by the training forward."""
    policy, device = PolicyModel(model), rollout.prompt_ids_BP.device
    sequences = rollout.sequences()
    parts = []
    for start in range(0, len(sequences), _FORWARD_SEQUENCES):
        rows = padded_rows(sequences[start : start + _FORWARD_SEQUENCES], sampling.pad_token_id).to(device)
        parts.append(policy(rows, sampling.temperature or 1.0).logprobs_M)
    return torch.cat(parts)
