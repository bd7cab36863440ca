"""The least that a competition's passes can take: their matrix products and attention at the measured matmul rate.

Elementwise work, the optimizer, the engine and the loop come on top; decoding is counted as if it reached that rate
too. Knows Threestep's passes alone: no padding, shared prompts computed once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.endless import PROMPTS
from benchmarks.workload import SHAPES, VOCABULARY, Workload
from training.utils.models.flops import ModelShape, training_flops

ROWS = 400  # of the workload, over which a unit's FLOPs are averaged
NEW_TOKENS = 64  # of a response in the PPO step


class Sizes(NamedTuple):
    """tokens: through the body. pairs: of attention. reads: positions at which the head is read."""

    tokens: int
    pairs: int
    reads: int


def shape_of(name: str, with_scores: bool = False) -> ModelShape:
    """Return what a token is multiplied with in a workload's model, or in its scalar model."""
    hidden, layers, _, intermediate = SHAPES[name]
    body = layers * (4.0 * hidden**2 + 3.0 * hidden * intermediate)
    return ModelShape(body, 0.0, hidden * (1.0 if with_scores else VOCABULARY), 0.0, layers * hidden)


def floor_flops(name: str, workload: Workload, shape: str) -> dict[str, float]:
    """Return the FLOPs a unit (token, pair, step) of Threestep's competitors; {} for a competition without a floor."""
    if name == "sft":
        texts = [_one(prompt, answer + 1) for prompt, answer in _lengths(workload.sft.read_text(), workload, "chosen")]
        return {"Threestep": _trained(shape_of(shape), texts) / sum(text.tokens for text in texts)}
    if name == "reward":
        rows = list(_lengths(workload.pairs.read_text(), workload, "chosen", "rejected"))
        pairs = [_shared(prompt, [length + 1 for length in lengths]) for prompt, *lengths in rows]
        return {"Threestep": _trained(shape_of(shape, with_scores=True), pairs) / len(pairs)}
    if name == "ppo":
        prompts = (workload.folder / "endless" / "prompts" / "train.jsonl").read_text()
        texts = [_one(prompt, NEW_TOKENS) for (prompt,) in _lengths(prompts, workload)][:PROMPTS]
        actor, scalar = (_trained(shape_of(shape, with_scores), texts) for with_scores in (False, True))
        # A forward is a third of training. Both learn; the reward model and the reference read; the actor decodes.
        reused = actor + scalar + scalar / 3 + actor / 3 + actor / 3
        apart = reused + (actor + scalar) / 3
        return {"Threestep, reusing forwards": reused, "Threestep, reading apart": apart}
    return {}


def floor_lines(flops: dict[str, float], rates: dict[str, float], matmul_rate: float, unit: str) -> list[str]:
    """Say for each competitor with a floor which share of its time matrix products alone would take.

    flops: a unit. rates: units a second, measured. matmul_rate: FLOPs a second."""
    return [
        f"{name}: its passes' products at the {matmul_rate / 1e9:,.0f} GFLOP/s measured here take "
        f"{flops[name] / matmul_rate:.3g} s a {unit}, {flops[name] / matmul_rate * rates[name]:.2f} of its time"
        for name in flops
        if name in rates
    ]


def _trained(shape: ModelShape, texts: Iterable[Sizes]) -> float:
    return sum(training_flops(shape, *text) for text in texts)


def _one(prompt: int, response: int) -> Sizes:
    tokens = prompt + response
    return Sizes(tokens, tokens * (tokens + 1) // 2, response)


def _shared(prompt: int, responses: list[int]) -> Sizes:
    """A prompt once with its responses, of each of which one score is read."""
    pairs = prompt * (prompt + 1) // 2 + sum(own * prompt + own * (own + 1) // 2 for own in responses)
    return Sizes(prompt + sum(responses), pairs, len(responses))


def _lengths(lines: str, workload: Workload, *columns: str) -> Iterable[list[int]]:
    """Yield the tokens of the prompt and of each column of the first rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    for line in lines.splitlines()[:ROWS]:
        row = json.loads(line)
        yield [len(ids) for ids in tokenizer([row[column] for column in ("prompt", *columns)])["input_ids"]]
