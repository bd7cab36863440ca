"""Answers drawn in one batch that lines join and leave: each as if it were drawn alone."""

from __future__ import annotations

import dataclasses
from queue import Empty, SimpleQueue

import pytest
import torch

from tests.support.sent_pictures import photo, seeing
from tests.support.tiny_models import tiny_causal_lm
from tests.support.vision_models import IMAGE_ID
from threestep.plugins.ragged import ragged_rows
from threestep.plugins.serve.endpoint.lines import AloneRows, Line, Order, TogetherRows
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.decoding.hf import TransformersRollout

GREEDY = Sampling(12, 0.0, 0, 1.0, end_token_id=2, pad_token_id=0)
FREE = dataclasses.replace(GREEDY, temperature=0.9)
CUT = dataclasses.replace(GREEDY, temperature=1.3, top_p=0.8, top_k=20)


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm("llama")


def orders() -> list[Order]:
    """Different lengths, settings and seeds; some prompts several times."""
    prompts = [(5, 6, 7), (9,), (5, 6, 7), tuple(range(10, 40)), (8, 8), (9,)]
    cases = zip(prompts, [GREEDY, FREE, CUT, FREE, CUT, GREEDY], [7, 12, 3, 9, 1, 11], strict=True)
    return [
        Order(ids, dataclasses.replace(sampling, max_new_tokens=most), frozenset({2}), seed)
        for seed, (ids, sampling, most) in enumerate(cases)
    ]


def alone(model, order: Order) -> list[int]:
    """The tokens of the rollout engine for this prompt and seed alone."""
    request = RolloutRequest.of_prompt(torch.tensor(order.ids), order.sampling, order.seed)
    return TransformersRollout().roll_out(model, request).response_of(0).tolist()


def drawn(line: Line) -> list[int]:
    tokens = []
    while True:
        try:
            event = line.events.get_nowait()
        except Empty:
            return tokens
        if event.token is not None:
            tokens.append(event.token.token)


@torch.no_grad()
def run(rows, lines: list[Line], at: list[int]) -> None:
    """at: the step at which each line joins."""
    step = 0
    while step <= max(at) or rows.lines:
        rows.leave()
        joining = [line for line, own in zip(lines, at, strict=True) if own == step]
        if joining:
            rows.join(joining)
        if any(not line.is_over for line in rows.lines):
            rows.step()
        step += 1


@pytest.mark.parametrize("at", [[0] * 6, [0, 1, 2, 3, 4, 5], [3, 3, 0, 0, 20, 20]])
def test_each_answer_is_that_of_its_prompt_and_seed_alone(model, at):
    lines = [Line(order, place, SimpleQueue()) for place, order in enumerate(orders())]
    run(TogetherRows(model), lines, at)
    assert [drawn(line) for line in lines] == [alone(model, order) for order in orders()]


def test_one_beside_the_other_draws_the_same(model):
    def stream(order: Order):
        request = RolloutRequest.of_prompt(torch.tensor(order.ids), order.sampling, order.seed)
        return TransformersRollout().stream(model, request, order.ends)

    lines = [Line(order, place, SimpleQueue()) for place, order in enumerate(orders())]
    run(AloneRows(stream), lines, [0, 1, 0, 1, 2, 2])
    assert [drawn(line) for line in lines] == [alone(model, order) for order in orders()]


def test_a_line_that_is_over_gives_its_row_to_others(model):
    rows, lines = TogetherRows(model), [Line(order, 0, SimpleQueue()) for order in orders()]
    with torch.no_grad():
        rows.join(lines[:4])
        rows.step()
        lines[1].is_over = lines[2].is_over = True  # their clients hung up
        rows.leave()
        assert set(rows.lines) == {line for line in (lines[0], lines[3]) if not line.is_over}
        before = [line.count for line in lines]
        rows.step()
    assert [line.count for line in (lines[1], lines[2])] == before[1:3]
    assert drawn(lines[3])[:3] == alone(model, orders()[3])[:3]


def test_logprobs_are_the_models_whatever_the_cuts(model):
    order = dataclasses.replace(orders()[2], alternatives=3)
    line = Line(order, 0, SimpleQueue())
    run(TogetherRows(model), [line], [0])
    events = [line.events.get_nowait() for _ in range(line.events.qsize())]
    found = [event.token for event in events if event.token is not None]
    ids = torch.tensor([[*order.ids, *(each.token for each in found)]])
    with torch.no_grad():
        logprobs_TV = model(input_ids=ids).logits[0].log_softmax(-1)[len(order.ids) - 1 :]
    for place, each in enumerate(found):
        assert each.logprob == pytest.approx(float(logprobs_TV[place, each.token]), abs=1e-5)
        values, tokens = logprobs_TV[place].topk(3)
        assert [token for token, _ in each.alternatives] == tokens.tolist()
        assert [value for _, value in each.alternatives] == pytest.approx(values.tolist(), abs=1e-5)


def test_every_end_ends_an_answer_and_a_shorter_one_is_the_beginning_of_a_longer_one(model):
    long = dataclasses.replace(FREE, max_new_tokens=40)
    answers = {seed: alone(model, Order((5, 6), long, frozenset({2}), seed)) for seed in range(20)}
    seed, tokens = next((seed, tokens) for seed, tokens in answers.items() if len(tokens) > 10)
    end = tokens[6]
    order = Order((5, 6), dataclasses.replace(long, max_new_tokens=20), frozenset({2, end}), seed)
    line = Line(order, 0, SimpleQueue())
    run(TogetherRows(model), [line], [0])
    assert drawn(line) == tokens[: tokens.index(end) + 1]


def test_numbers_that_are_none_fail_their_answer(model):
    broken = tiny_causal_lm("llama")
    broken.lm_head.weight.data.fill_(float("nan"))
    line = Line(orders()[1], 0, SimpleQueue())
    run(TogetherRows(broken), [line], [0])
    assert "the model's logits are NaN" in str(line.events.get_nowait().failed)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
@pytest.mark.parametrize(("at", "mask"), [([0] * 6, 1 << 25), ([0, 2, 1, 1, 3, 5], 30)])
def test_prompts_with_pictures_are_continued_as_by_the_model_itself(family, at, mask, monkeypatch):
    """Beside texts and each other; two of them have the same tokens and other pictures. mask: small enough for prompts
    to be read in parts."""
    monkeypatch.setattr(ragged_rows, "_MASK_NUMBERS", mask)
    seen, (one, other, small) = seeing(family), (photo(1, 84, 56), photo(2, 84, 56), photo(3, 28, 56))
    prompts = [[5, one, 6, 7], [5, other, 6, 7], [8, 9, 10], [one, 4, small, 9], [11, 12, 13, other], [5, one, 6, 7]]
    sampling = dataclasses.replace(GREEDY, max_new_tokens=5, end_token_id=-1, bad_words=((IMAGE_ID,),))
    media, lines = {}, []
    for place, parts in enumerate(prompts):
        pictures = [part for part in parts if isinstance(part, bytes)]
        key, spans, begin = tuple(map(str, parts)), [], 0
        for part in parts:
            read = [] if isinstance(part, int) else seen.media.read("image", {"data": part, "format": "png"}, "").media
            spans += [dataclasses.replace(span, begin=begin, key=pictures.index(part)) for span in read]
            begin += len(seen.ids([part]))
        own = media.setdefault(key, seen.media.of(pictures).of_prompts([tuple(spans)]))
        order = Order(tuple(seen.ids(parts)), sampling, frozenset(), place, 0, own)
        lines.append(Line(order, place, SimpleQueue()))
    run(TogetherRows(seen.model), lines, at)
    for line, parts in zip(lines, prompts, strict=True):
        events = [line.events.get_nowait() for _ in range(line.events.qsize())]
        found = [event.token for event in events if event.token is not None]
        tokens = [each.token for each in found]
        assert tokens == seen.greedy(parts, 5)
        known_TV = seen.logprobs([*parts, *tokens])[-6:-1]
        known = known_TV.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        assert [each.logprob for each in found] == pytest.approx(known.tolist(), abs=1e-5)
