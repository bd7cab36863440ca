"""Rollouts with and without guesses: prompts that the model was trained on, four responses each.

    python -m benchmarks.competitors.speculation --model DIR --rows FILE --how plain|head|head2|ngram|auto

note: one line, for --prompts: the share of the head's guesses that are right, and what a round costs, in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.competitors.rollout import DTYPES, SAMPLES
from threestep.plugins.mtp.folder import read_head
from threestep.plugins.mtp.head import MtpHead, new_head
from threestep.plugins.speculation.frequent import FrequentTokens, vocabulary_of
from threestep.plugins.speculation.guessing import Guessing
from threestep.plugins.speculation.settings import Speculation
from threestep.plugins.speculation.speculation import GuessCounts, Guesses, drawn_by_guesses
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.document_attention import use_document_attention
from training.utils.models.own_forward import own_forward_of

HOWS = ("plain", "head", "head2", "ngram", "auto")
_TURNS = 3

Draw = Callable[[RolloutRequest], Rollout]


def main() -> None:
    """Generate `--steps` times, with other seeds each time, and print tokens and seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--how", required=True, choices=(*HOWS, "note"))
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype]).eval().to(device)
    head = new_head(model, 1, 0)
    read_head(arguments.model, head)
    head = head.eval().to(device)
    use_document_attention(model)
    request_of = _requests(arguments, device)
    if arguments.how == "note":
        print(_note(model, head, request_of))
        return
    draw = _draws(model, head, GuessCounts())[arguments.how]
    for step in range(arguments.steps):
        request, started = request_of(step), time.perf_counter()
        tokens = int(draw(request).response_lengths_B.sum())
        print(json.dumps({"units": tokens, "seconds": time.perf_counter() - started}), flush=True)


def _requests(arguments: argparse.Namespace, device: torch.device) -> Callable[[int], RolloutRequest]:
    """Return what makes the request of a step."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    lines = Path(arguments.rows).read_text().splitlines()[: arguments.prompts]
    batch = tokenizer([json.loads(line)["prompt"] for line in lines], padding=True, return_tensors="pt").to(device)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    sampling = Sampling(arguments.new_tokens, arguments.temperature, 0, 1.0, end_token_id=end, pad_token_id=pad)
    ids_BP, mask_BP, count = batch["input_ids"], batch["attention_mask"].bool(), SAMPLES * len(lines)
    return lambda step: RolloutRequest(ids_BP, mask_BP, sampling, range(step * count, (step + 1) * count), SAMPLES)


def _draws(model: PreTrainedModel, head: MtpHead, counts: GuessCounts) -> dict[str, Draw]:
    """By name, what draws a rollout. counts: are added to."""
    plain = TransformersRollout()
    auto, by_guesses = TransformersRollout(), partial(_by_guesses, model, counts=counts)
    auto.draw_by(Guessing(Speculation(1, is_auto=True), lambda: nullcontext(head), print))
    own = own_forward_of(model)
    assert own is not None, "the model is whole"
    for engine in (plain, auto):
        engine.check(nullcontext(model), own)

    def by_auto(request: RolloutRequest) -> Rollout:
        with auto.lent(_Lends(model)) as lent:  # type: ignore[arg-type]
            return auto.roll_out(lent, request)

    return {
        "plain": partial(plain.roll_out, model),
        "head": by_guesses(head),
        "head2": by_guesses(head, guesses=2),
        "ngram": by_guesses(None),
        "auto": by_auto,
    }


class _Lends:
    """In place of a WholeModel."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def lent(self) -> Any:
        return nullcontext(self._model)


def _by_guesses(model: PreTrainedModel, head: MtpHead | None, counts: GuessCounts, guesses: int = 1) -> Draw:
    """As `--speculate GUESSES` draws, without the rollouts in between that are measured without guesses."""
    frequent = FrequentTokens()

    @torch.no_grad()
    def draw(request: RolloutRequest) -> Rollout:
        among_S = frequent.among(request.prompt_ids_BP[request.prompt_mask_BP])
        rollout = drawn_by_guesses(model, Guesses(guesses, head, among_S), request, None, counts=counts)
        frequent.note(rollout, vocabulary_of(model))
        return rollout

    return draw


def _note(model: PreTrainedModel, head: MtpHead, request_of: Callable[[int], RolloutRequest]) -> str:
    """Both in turns, after one each that warms up: a plain forward draws a token a row, a round of guesses more."""
    counts, seconds = GuessCounts(), dict[str, list[float]](plain=[], head=[])
    draws = _draws(model, head, counts)
    for turn in range(_TURNS + 1):
        for name, known in seconds.items():
            started = time.process_time()
            tokens = int(draws[name](request_of(turn)).response_lengths_B.sum())
            if turn:
                known.append((time.process_time() - started) / tokens)
    faster = statistics.median(seconds["plain"]) / statistics.median(seconds["head"])
    share, gained = counts.accepted / counts.guesses, counts.tokens / counts.forwards
    cost = gained / faster
    return (
        f"{share} {share:.2f} of the head's guesses are right, {gained:.2f} tokens a forward, {faster:.2f} times as "
        f"fast in CPU seconds: a round costs {cost:.2f} plain forwards, so that guesses pay from an acceptance of "
        f"{cost - 1:.2f} on, and 1.2 times from {1.2 * cost - 1:.2f} on"
    )


if __name__ == "__main__":
    main()
