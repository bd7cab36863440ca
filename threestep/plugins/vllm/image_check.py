"""Checks that vLLM computes the model's own forward on rows with images: before the first rollout, on the
examples by which the model was read when it was loaded (`models.pictured`).

Their tokens, which are given, get the log-probabilities that vLLM computes in its forward of a prompt. What comes of
other positions, another mask or weights in another place shows as a difference.

M targets of the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.vllm.images import PlacedImage, engine_prompt, placed_images
from threestep.plugins.vllm.instance import VllmInstance, vllm_at_work
from training.utils.models.own_forward import rms

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import MediaForward


def why_other_images(vllm: VllmInstance, pictured: MediaForward, dtype: torch.dtype) -> str | None:
    """Return None if vLLM, which holds the weights that `pictured` was read from, gives its numbers, and others for
    another image; else the reason why not. dtype: of the weights."""
    documents = pictured.media.examples
    spans = tuple(document.segments[0].tokens.media for document in documents)
    placed = placed_images(pictured.media.of_prompts(spans), dtype)
    read_M = _read(vllm, documents, placed)
    # Another kernel rounds as often as the model's own forward does; so both may be off by as much.
    tolerance = 2 * pictured.tolerance + torch.finfo(torch.float32).eps * float(pictured.numbers_M.abs().max())
    difference = rms(read_M - pictured.numbers_M)
    if not difference <= tolerance:
        return f"its log-probabilities differ by {difference:.2g} (rounding explains {tolerance:.2g})"
    first, *others = placed[0]
    negated = replace(first, values=-first.values, digest=f"negative of {first.digest}")
    if torch.equal(_read(vllm, documents[:1], [(negated, *others)]), _read(vllm, documents[:1], placed[:1])):
        return "a different image does not change its log-probabilities"
    return None


def _read(vllm: VllmInstance, documents: Sequence[Document], placed: Sequence[tuple[PlacedImage, ...]]) -> torch.Tensor:
    """Return the log-probabilities (float64) of the targets of documents of one segment."""
    from vllm import SamplingParams

    engine, found = vllm.llm.llm_engine, dict[str, Any]()
    model_type = engine.model_config.hf_config.model_type
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
    with vllm_at_work():
        vllm.forget_prompts()
        vllm.set_temperature(1.0)
        for place, (document, images) in enumerate(zip(documents, placed, strict=True)):
            ids = document.segments[0].tokens.input_ids.tolist()
            engine.add_request(str(place), engine_prompt(model_type, ids, images), params)
        while engine.has_unfinished_requests():
            found.update((output.request_id, output) for output in engine.step() if output.finished)
    logprobs = list[float]()
    for place, document in enumerate(documents):
        tokens = document.segments[0].tokens
        ids, given = tokens.input_ids.tolist(), found[str(place)].prompt_logprobs
        logprobs += [given[at][ids[at]].logprob for at in tokens.is_target.nonzero().flatten().tolist()]
    return torch.tensor(logprobs, dtype=torch.float64)
