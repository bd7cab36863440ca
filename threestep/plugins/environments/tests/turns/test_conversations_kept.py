"""Turns whose conversations keep their cache: the tokens of rounds, each computed once, whoever waits for whom."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts, responses, spelt
from threestep.plugins.environments.tests.turns.test_conversations import (
    LIMITS,
    SAMPLING,
    Scripted,
    converse,
    model_that_turns,
)
from threestep.plugins.environments.turns.kept_turns import KeptTurns, TurnsKept
from threestep.plugins.ragged.ragged_rows import RaggedRows
from training.utils.contracts.decode_loops import DecodeLoop
from training.utils.contracts.drawing import NextTurn
from training.utils.contracts.rollout_engine import Drawing, Ends, RolloutRequest
from training.utils.generation.decoding.decoding import FIXED, MASKED
from training.utils.generation.decoding.hf import TransformersRollout

LENGTHS = (3, 11, 1, 7, 5) * 2
CUT = replace(
    SAMPLING, top_p=0.9, temperature=0.7, bad_words=((9,), (5, 2), (7, 11)), ends=Ends((spelt([8]), spelt([6, 2])))
)


class Keeping(TransformersRollout):
    """As `check` leaves it for a family that fits."""

    _turns, _way = TurnsKept(fixed=False), MASKED


class Captured(Keeping):
    _turns, _way = TurnsKept(fixed=True), FIXED


TURNS = Drawing(turns=TurnsKept())


@pytest.fixture(scope="module")
def model():
    return model_that_turns()


def same(left, right) -> None:
    assert responses(left[0]) == responses(right[0]) and left[0].records == right[0].records
    for name in ("prompt_ids_BP", "prompt_mask_BP", "ended_B", "inserted_BR"):
        assert torch.equal(getattr(left[0], name), getattr(right[0], name)), name
    assert torch.equal(left[0].conversations.turn_rewards_BR, right[0].conversations.turn_rewards_BR)
    logprobs = (each[0].sampled_logprobs_BR for each in (left, right))
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-5)
    assert [partner.said for partner in left[1]] == [partner.said for partner in right[1]]


@pytest.mark.needs_plugin("captured")
@pytest.mark.parametrize("sampling", [SAMPLING, CUT], ids=["whole", "cut"])
def test_conversations_are_those_of_rounds(model, sampling):
    """60 of them; between two looks for ends one token or, as on a GPU, several."""
    rounds = converse(model, LENGTHS, 6, sampling=sampling, draws=TransformersRollout(spelt))
    assert max(record.turns for record in rounds[0].records) >= 4
    for draws, every in ((Keeping, 1), (Keeping, 3), (Captured, 3)):
        seldom = replace(sampling, ends=replace(sampling.ends, check_tokens=every))
        same(converse(model, LENGTHS, 6, sampling=seldom, draws=draws(spelt)), rounds)


def test_no_token_is_computed_twice(model, monkeypatch):
    given, steps = [], []
    give, step = RaggedRows.give, RaggedRows.step
    monkeypatch.setattr(RaggedRows, "give", lambda rows, first, ids: (given.append(ids), give(rows, first, ids))[1])
    monkeypatch.setattr(RaggedRows, "step", lambda rows, *of: (steps.append(len(of[0])), step(rows, *of))[1])
    rollout, partners = converse(model, LENGTHS, 10, draws=Keeping())
    assert len(given[0]) == 10 and sum(map(len, given[0])) == sum(LENGTHS)  # samples share their prompt
    computed = sum(len(ids) for ids_J in given for ids in ids_J) + sum(steps)
    # The last token of a conversation need not be.
    assert computed == sum(LENGTHS) + int(rollout.response_lengths_B.sum()) - len(partners)


class Late(Scripted):
    """The first turn of all is answered once another conversation has drawn its third; other answers take different
    times."""

    third = threading.Event()
    asked: list[int] = []
    in_time: list[bool] = []

    def step(self, message) -> Future:
        answer, late, is_first = super().step(message), Future(), not self.asked
        self.asked.append(self.seed)
        if len(self.said) == 3:
            self.third.set()

        def give() -> None:
            if is_first:
                self.in_time.append(self.third.wait(10))
            else:
                time.sleep(0.0005 * (self.seed * 7 % 5))
            late.set_result(answer.result())

        threading.Thread(target=give, daemon=True).start()
        return late


def test_others_go_on_while_one_waits(model):
    """Without an interval. And all draw what they do where each answer is there at once."""
    late = converse(model, LENGTHS, 4, replace(LIMITS, answer_interval=0), draws=Keeping(), kind=Late)
    assert Late.in_time == [True]
    same(late, converse(model, LENGTHS, 4, draws=Keeping()))


class Delayed(Scripted):
    """Answers come after times that no seed decides, in any order."""

    def step(self, message) -> Future:
        answer, late = super().step(message), Future()
        threading.Timer(random.uniform(0, 0.01), lambda: late.set_result(answer.result())).start()
        return late


@pytest.mark.parametrize("interval", [1, 8, 32])
@pytest.mark.parametrize("draws", [Keeping, pytest.param(Captured, marks=pytest.mark.needs_plugin("captured"))])
def test_delays_change_no_bit(model, draws, interval):
    limits = replace(LIMITS, answer_interval=interval)
    at_once, _ = converse(model, LENGTHS, 4, limits, draws=draws())
    for _ in range(2):
        delayed, _ = converse(model, LENGTHS, 4, limits, draws=draws(), kind=Delayed)
        assert torch.equal(delayed.sampled_logprobs_BR, at_once.sampled_logprobs_BR)
        assert responses(delayed) == responses(at_once)


def test_a_conversation_that_goes_on_otherwise_computes_what_is_new(model, monkeypatch):
    """Its second turn comes behind half of the first and other tokens, its third behind nothing that it had."""
    given, give = [], RaggedRows.give
    monkeypatch.setattr(RaggedRows, "give", lambda rows, first, ids: (given.extend(ids), give(rows, first, ids))[1])
    ids_BP, mask_BP = prompts((9, 4))
    turns = KeptTurns(model, SAMPLING, None, 1, fixed=False)
    first, beside = (ids[mask].tolist() for ids, mask in zip(ids_BP, mask_BP, strict=True))
    drawn = drawn_turns(turns, NextTurn("a", first, 3, 12), NextTurn("b", beside, 4, 20))
    texts = [first, first[:5] + [9, 8], [7, 6, 5], [7, 6, 5], first + drawn["a"].ids]
    wanted = [texts[0], beside, [9, 8], [7, 6, 5], [5], texts[4]]
    for seed, ids in enumerate(texts):
        if seed:
            drawn = drawn_turns(turns, NextTurn("a", ids, 3 + seed, 12))
        request = RolloutRequest.of_prompt(torch.tensor(ids), replace(SAMPLING, max_new_tokens=12), 3 + seed)
        assert drawn["a"].ids == TransformersRollout().roll_out(model, request).response_of(0).tolist()
    assert given == wanted


def drawn_turns(turns: KeptTurns, *added: NextTurn) -> dict:
    for turn in added:
        turns.add(turn)
    drawn = {}
    while turns.is_drawing:
        drawn |= {each.key: each for each in turns.advance()}
    return drawn


def test_where_nobody_answers_the_engine_draws_by_itself(model, monkeypatch):
    monkeypatch.delattr(KeptTurns, "add")
    rollout, _ = converse(model, draws=Keeping(), alone=lambda number: True)
    same((rollout, []), converse(model, alone=lambda number: True))


def test_rows_that_have_left_take_no_memory(model):
    turns = KeptTurns(model, replace(PLAIN, max_new_tokens=400), None, 1, fixed=False)
    drawn_turns(turns, *(NextTurn(key, [key + 3, 4], key, 2) for key in range(8)))
    for key in range(1, 8):
        turns.drop(key)
    assert turns._rows.room[0] == 8
    drawn_turns(turns, NextTurn(0, [3, 4, 5], 0, 400 - 272))
    assert turns._rows.room[0] == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "cohere", "granite"])
def test_families_that_take_several_tokens_keep_what_they_computed(family):
    model, own = known(family)
    engine = TransformersRollout()
    assert engine.check(nullcontext(model), own, TURNS) == []
    assert isinstance(engine.turns_of(model, PLAIN), KeptTurns)


def test_others_draw_in_rounds_and_say_why():
    class Own(TransformersRollout):
        def roll_out(self, model, request):
            return super().roll_out(model, request)

    class Whole(DecodeLoop):
        name = "--whole"

    other = TransformersRollout()
    other.draw_by(Whole())
    for family, engine, reason in (
        ("gemma2", TransformersRollout(), "its layers see the last tokens alone"),
        ("mamba", TransformersRollout(), "the family makes its masks itself"),
        ("bloom", TransformersRollout(), "the family makes its masks itself"),
        ("llama", Own(), "Own draws by a roll_out of its own"),
        ("llama", other, "--whole draws whole responses"),
    ):
        model, own = known(family)
        (*_, note) = engine.check(nullcontext(model), own, TURNS)
        assert engine.turns_of(model, PLAIN) is None and note.startswith(f"warning: {type(model).__name__} reads each")
        assert "all wait for the slowest answer: " in note and reason in note
