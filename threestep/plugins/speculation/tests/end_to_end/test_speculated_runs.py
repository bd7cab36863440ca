"""Rollouts by guesses of a trained head, and of n-grams, over 2,000 sequences of each kind of sampling: the tokens are
those of rollouts without, one by one, but where a number falls on the border of two tokens to within rounding."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import run_module, run_step

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # on a busy machine

# How far apart two forwards of the same tokens may put the border of two tokens, in float32.
_BORDER = (0.0, 1e-7, 3e-7, 1e-6, 3e-6)
PROMPTS, SAMPLES, BATCH, MOST_TOKENS = 500, 4, 100, 24
MODEL = "--data_path embedded --vocab_size 512 --hidden_size 96 --num_hidden_layers 3 --num_attention_heads 4"
SFT = (
    "--data_path embedded --data_split 10,12,3 --max_seq_len 64 --dtype fp32 --mtp_num_layers 1 --mtp_loss_coef 1 "
    "--max_train_steps 150 --per_device_train_batch_size 32 --learning_rate 2e-3 --max_eval_rows 8 --report false"
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "greedy": {"temperature": 0.0},
    "stop": {"stop": ("e", "3,")},
    "bad_words": {"bad_words": True},
}


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[Any, Any, Any]:
    """(model, tokenizer, head) after SFT on the embedded task."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from threestep.plugins.mtp.folder import read_head
    from threestep.plugins.mtp.head import new_head

    start, out = place / "drafting_start", place / "drafting"
    done = run_module("threestep.plugins.programs.new_model", ["--out", start, *MODEL.split()])
    assert done.code == 0, done.words
    flags = ["--model_name_or_path", start, "--output_dir", out, "--data_output_path", place / "drafting_cache"]
    done = run_step(1, [*flags, *SFT.split()])
    assert done.code == 0, done.words
    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    head = new_head(model, 1, 0)
    read_head(out / "model", head)
    return model, AutoTokenizer.from_pretrained(out / "model", padding_side="left"), head.eval()


def requests_of(tokenizer: Any, changed: dict[str, Any]) -> list[Any]:
    """One for each batch of prompts."""
    from threestep.plugins.embedded.task import EmbeddedDataset
    from training.utils.contracts.rollout_engine import RolloutRequest, Sampling

    source = EmbeddedDataset("", 1, 0, "embedded")
    prompts = [source.get_prompt(source.get_train_data()[index]) for index in range(PROMPTS)]
    changed = dict(changed)
    if changed.get("bad_words"):  # tokens that answers hold
        changed["bad_words"] = tuple((tokenizer(text, add_special_tokens=False)["input_ids"][-1],) for text in "a3")
    sampling = Sampling(MOST_TOKENS, 1.0, 0, 1.0, tokenizer.eos_token_id, tokenizer.pad_token_id)
    found = []
    for first in range(0, PROMPTS, BATCH):
        batch = tokenizer(prompts[first : first + BATCH], padding=True, return_tensors="pt")
        seeds = range(first * SAMPLES, (first + BATCH) * SAMPLES)
        mask_BP = batch["attention_mask"].bool()
        found.append(RolloutRequest(batch["input_ids"], mask_BP, replace(sampling, **changed), seeds, SAMPLES))
    return found


def is_border(model: Any, request: Any, row: int, one: Any, other: Any) -> bool:
    """Whether the first tokens that differ are both drawn by numbers that are nearly the row's."""
    from training.utils.generation.decoding.drawn import uniform_streams
    from training.utils.generation.decoding.sampling import draw

    first, second = one.response_of(row).tolist(), other.response_of(row).tolist()
    place = next(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    ids_1T = torch.cat([one.prompt_of(row), one.response_of(row)[:place]]).unsqueeze(0)
    with torch.no_grad():
        logits_1V = model(input_ids=ids_1T).logits[:, -1]
    number_1 = uniform_streams([request.seeds[row]], place + 1, 1)[:, place]
    near = [draw(logits_1V, number_1 + shift, request.sampling)[0] for shift in (*_BORDER, *(-s for s in _BORDER))]
    return {int(token_1) for token_1 in near} >= {first[place], second[place]}


@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_sequences(kind, trained):
    from threestep.plugins.speculation.frequent import FrequentTokens, vocabulary_of
    from threestep.plugins.speculation.speculation import GuessCounts, Guesses, drawn_by_guesses
    from training.utils.generation.decoding.drawn import stop_strings
    from training.utils.generation.decoding.hf import TransformersRollout

    model, tokenizer, head = trained
    decode, frequent, counts = partial(tokenizer.decode), FrequentTokens(), GuessCounts()
    engine, by_ngrams, seconds = TransformersRollout(decode), GuessCounts(), [0.0, 0.0]
    borders, apart, ended = 0, 0.0, 0
    for request in requests_of(tokenizer, KINDS[kind]):
        stop, started = stop_strings(request.sampling, decode), time.process_time()
        plain = engine.roll_out(model, request)
        seconds[0] += time.process_time() - started
        among_S = frequent.among(request.prompt_ids_BP[request.prompt_mask_BP])
        for how, count in ((Guesses(1, head, among_S), counts), (Guesses(3), by_ngrams)):
            started = time.process_time()
            with torch.no_grad():
                drawn = drawn_by_guesses(model, how, request, stop, counts=count)
            seconds[1] += (time.process_time() - started) if how.head is not None else 0.0
            others = [
                row
                for row in range(len(request.seeds))
                if not torch.equal(plain.response_of(row), drawn.response_of(row))
            ]
            assert all(is_border(model, request, row, plain, drawn) for row in others), (kind, how.head is None, others)
            borders += len(others)
            if not others:
                apart = max(apart, float((plain.sampled_logprobs_BR - drawn.sampled_logprobs_BR).abs().max()))
                assert torch.equal(plain.ended_B, drawn.ended_B)
        frequent.note(plain, vocabulary_of(model))
        ended += int(plain.ended_B.sum())
    figures = {**counts.figures(), "borders": borders, "apart": apart, "ngram": by_ngrams.figures()}
    print(f"{kind}: {figures}, {seconds[0] / seconds[1]:.2f} times as fast in CPU seconds")
    assert borders <= 2 and apart < 5e-5
    assert counts.guesses > 0 and counts.tokens > counts.forwards and ended > 0
