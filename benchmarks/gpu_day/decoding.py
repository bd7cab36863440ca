"""Part 4: tokens a second of rollouts and of transformers' `generate`, by model, batch and heads that share keys."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.models import SHAPES, random_model, sequence
from benchmarks.gpu_day.record import NotHere, Report
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.own_forward import read_own_forward

CAPTURED = "threestep.plugins.captured.steps"
OURS, GENERATE, OWN_CACHE = "rollout", "generate", "rollout with the family's own growing cache"


def measure(report: Report) -> None:
    """Every model, batch and way; the models one after the other, so that one is in memory at a time."""
    shapes = ("1300m", "1300m_shared_keys", "7b") if report.full else ("tiny",)
    batches, prompt, new = ((64, 256, 16), 256, 128) if report.full else ((3,), 6, 5)
    dtype = torch.bfloat16 if report.full else torch.float32
    report.case("what decodes", "captured steps in fixed places", _captured)
    for shape in shapes:
        model: list[Any] = []
        for batch in batches:
            request = request_of(batch, prompt, new, SHAPES[shape][-1])
            for name, way in WAYS.items():

                def case(
                    request: RolloutRequest = request, way: Any = way, shape: str = shape, model: Any = model
                ) -> dict:
                    if not model:
                        model.append(random_model(shape, dtype, machine.device()))
                    return rates(lambda: way(model[0], request), request)

                report.case(f"{shape}: prompts of {prompt}, {new} new tokens", f"{name}, batch {batch}", case)
        model.clear()


def request_of(batch: int, prompt: int, new: int, vocabulary: int, ends: bool = False) -> RolloutRequest:
    """Return prompts of one length, each answered once, by `new` tokens exactly: no token ends a response."""
    ids_BP = torch.stack([sequence(prompt, vocabulary, seed).input_ids for seed in range(batch)]).to(machine.device())
    sampling = Sampling(new, temperature=1.0, top_k=0, top_p=1.0, end_token_id=-1, pad_token_id=1)
    return RolloutRequest(ids_BP, torch.ones_like(ids_BP).bool(), sampling, range(batch))


def rates(call: Callable[[], torch.Tensor], request: RolloutRequest) -> dict[str, Any]:
    """Return tokens a second of `call`, which returns response ids [B, R], after one call that warms up."""
    (batch, new), most = call().shape, request.sampling.max_new_tokens
    if new != most:
        raise AssertionError(f"{most} tokens were to be drawn, and {new} were")
    seconds, peak = machine.with_peak(lambda: machine.median_seconds(call, repeats=2, warm_up=0))
    return {
        "tokens/s": batch * new / seconds,
        "ms a token of the batch": 1000 * seconds / new,
        "seconds": seconds,
        "peak, GiB": machine.gib(peak),
    }


def _rollout(model: Any, request: RolloutRequest) -> torch.Tensor:
    return checked_rollout(model).roll_out(model, request).response_ids_BR


def checked_rollout(model: Any) -> TransformersRollout:
    """As a program has it: unchecked, it decodes in the way of most families, without graphs."""
    engine = TransformersRollout()
    for line in engine.check(contextlib.nullcontext(model), read_own_forward(model, 0)):
        print(line, file=sys.stderr, flush=True)
    return engine


def _own_cache(model: Any, request: RolloutRequest) -> torch.Tensor:
    from training.utils.generation.decoding.decoding import WAYS as DECODE_WAYS

    engine = TransformersRollout()
    engine._way = DECODE_WAYS[1]
    return engine.roll_out(model, request).response_ids_BR


def _generate(model: Any, request: RolloutRequest) -> torch.Tensor:
    sampling, ids_BP = request.sampling, request.prompt_ids_BP
    model.generation_config.eos_token_id = None
    drawn = model.generate(
        ids_BP,
        attention_mask=request.prompt_mask_BP.long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=sampling.pad_token_id,
    )
    return drawn[:, ids_BP.shape[1] :]


WAYS: dict[str, Callable[[Any, RolloutRequest], torch.Tensor]] = {
    OURS: _rollout,
    GENERATE: _generate,
    OWN_CACHE: _own_cache,
}


def _captured() -> dict[str, Any]:
    if importlib.util.find_spec(CAPTURED) is None:
        raise NotHere("this version's rollouts grow their cache and capture no graphs")
    return {"rollouts": "in fixed places, captured where the family allows it (their lines below)"}
