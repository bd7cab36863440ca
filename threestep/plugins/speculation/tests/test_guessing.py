"""An engine that guesses: what it refuses and says, its pace, its kept rows, the tokens among which it guesses."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.unit.step3_ppo.flags.test_checks import names_of
from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_decoding import PADDED
from tests.unit.utils.generation.decoding.test_hf import GREEDY, PLAIN, prompts, responses, roll
from threestep.plugins.environments.turns.conversations import ActingRollout, ConversationLimits
from threestep.plugins.images.tests.run.test_run import beside_images
from threestep.plugins.mtp.head import new_head
from threestep.plugins.speculation import kept_rows
from threestep.plugins.speculation.frequent import FewLogits, FrequentTokens, vocabulary_of
from threestep.plugins.speculation.guessing import Guessing
from threestep.plugins.speculation.kept_rows import KeptRows
from threestep.plugins.speculation.ngrams import NOTHING, NgramRows
from threestep.plugins.speculation.pace import Pace, RoundPace
from threestep.plugins.speculation.settings import Speculation
from threestep.plugins.speculation.verified import why_not_verified
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.generation.decoding.cache import moves_when_leaving
from training.utils.generation.decoding.hf import TransformersRollout


@pytest.fixture(scope="module")
def llama():
    return known("llama")


class _Actor:
    """In place of a WholeModel."""

    def __init__(self, model):
        self._model = model

    def lent(self):
        return nullcontext(self._model)


def engine_of(model, how: Speculation):
    """A guessing engine, and the sentences that it prints."""
    engine, told = TransformersRollout(), []
    head = new_head(model, 1, 0).eval()
    engine.draw_by(Guessing(how, lambda: nullcontext(head), told.append))
    return engine, told


def test_a_rollout_is_the_same_and_says_that_it_does_not_pay(llama):
    model, own = llama
    engine, told = engine_of(model, Speculation(2))
    plain = TransformersRollout()
    assert engine.check(nullcontext(model), own) == plain.check(nullcontext(model), own) == []
    assert engine.figures() == {}  # the check's own guesses are not counted
    ids_BP, mask_BP = prompts()
    request = RolloutRequest(ids_BP, mask_BP, replace(PLAIN, max_new_tokens=6), list(range(8)))
    expected = responses(plain.roll_out(model, request))
    with engine.lent(_Actor(model)) as lent:
        for _ in range(6):
            assert responses(engine.roll_out(lent, request)) == expected
    figures = engine.figures()
    assert 0 <= figures["rollout/guesses_accepted"] < 0.5 and figures["rollout/tokens_per_forward"] >= 1
    [sentence] = told
    pays = figures["rollout/speculation_speedup"] >= 1
    verb = "pays off" if pays else "does not pay off"
    assert f"--speculate 2 {verb}: " in sentence and "of its guesses correct" in sentence
    # A model that is not lent brings no head.
    assert responses(engine.roll_out(model, request)) == expected and engine.figures().keys() <= {
        "rollout/speculation_speedup"
    }


@pytest.mark.parametrize(
    ("family", "said"),
    [("gemma2", "layers see only the most recent tokens"), ("bloom", "builds its own attention mas")],
)
def test_families_that_cannot_be_verified(family, said):
    model, own = known(family)

    def engine_for(how: Speculation):
        return engine_of(known("llama")[0], how)[0]

    with pytest.raises(
        ThreestepError, match=f"--speculate 1 verifies several .* at once, but .* does not support this: .*{said}"
    ):
        engine_for(Speculation(1)).check(nullcontext(model), own)
    engine = engine_for(Speculation(1, is_auto=True))
    *_, note = engine.check(nullcontext(model), own)
    assert "--speculate auto is switched off" in note and said in note
    with engine.lent(_Actor(model)) as lent:
        ids_BP, mask_BP = prompts()
        engine.roll_out(lent, RolloutRequest(ids_BP, mask_BP, replace(PLAIN, max_new_tokens=2), list(range(8))))
    assert engine.figures() == {}


def acting(engine: TransformersRollout) -> ActingRollout:
    return ActingRollout(engine, lambda row, seed: None, None, ConversationLimits(1, None, None, 50, 32))


@pytest.mark.parametrize("through", [lambda engine: engine, acting], ids=["alone", "with environments"])
def test_a_resumed_engine_guesses_as_the_unbroken_one(llama, through):
    """When, and among which tokens: both change how log-probabilities are rounded."""
    model, own = llama
    ids_BP, mask_BP = prompts()
    sampling = replace(PLAIN, max_new_tokens=6)
    request = RolloutRequest(ids_BP, mask_BP, sampling, range(len(ids_BP)), rows=[None] * len(ids_BP))

    def drawn(engine, count: int) -> list[torch.Tensor]:
        with engine.lent(_Actor(model)) as lent:
            return [engine.roll_out(lent, request).sampled_logprobs_BR for _ in range(count)]

    engines = []
    for _ in range(3):
        engine = through(engine_of(model, Speculation(1))[0])
        engine.check(nullcontext(model), own)
        engines.append(engine)
    unbroken, stopped, resumed = engines
    expected, before = drawn(unbroken, 6), drawn(stopped, 3)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert all(map(torch.equal, [*before, *drawn(resumed, 3)], expected))
    states = [engine.state_dict() for engine in (resumed, unbroken)]
    assert states[0]["frequent"] == states[1]["frequent"]
    assert [[known["count"] for known in state["pace"]] for state in states] == [[6], [6]]
    assert states[0]["counts"] == states[1]["counts"]  # the next figures are of the rollouts before the stop too


def test_ngrams_need_no_head(llama):
    """From the first rollout on, whether the model is lent or not."""
    model, own = llama
    engine, plain = TransformersRollout(), TransformersRollout()
    engine.draw_by(Guessing(Speculation(2, by="ngram"), None, print))
    assert engine.check(nullcontext(model), own) == plain.check(nullcontext(model), own) == []
    ids_BP, mask_BP = prompts()
    request = RolloutRequest(ids_BP, mask_BP, replace(GREEDY, max_new_tokens=30), list(range(8)))
    assert responses(engine.roll_out(model, request)) == responses(plain.roll_out(model, request))
    assert engine.figures()["rollout/tokens_per_forward"] > 1
    assert engine._loop._frequent.among(ids_BP[0, -1:]) is not None  # a head would guess among these


def test_a_cache_that_keeps_wrong_tokens_is_found(llama, monkeypatch):
    assert why_not_verified(*llama, 1) is None and why_not_verified(*llama, 3) is None

    def keep_without_masks(rows, kept_A, most):
        rows._next_A = rows._next_A + kept_A

    monkeypatch.setattr(kept_rows.KeptRows, "keep", keep_without_masks)
    assert "log-probabilities differ" in why_not_verified(*llama, 1)


def test_a_head_that_fails_is_named(llama):
    model, own = llama
    engine = TransformersRollout()
    broken = new_head(model, 1, 0)
    broken.depths[0].eh_proj = torch.nn.Linear(3, 3)
    engine.draw_by(Guessing(Speculation(1), lambda: nullcontext(broken), print))
    with pytest.raises(
        ThreestepError, match="but LlamaForCausalLM does not support this: its head fails .RuntimeError: "
    ):
        engine.check(nullcontext(model), own)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"mtp_num_layers": 0, "speculate_by": "head"},
            "--speculate 1 guesses with a .* head, but there is none; add --mtp_num_layers 1 or --speculate_by ngram",
        ),
        ({"speculate": "0", "speculate_by": "ngram"}, "--speculate_by ngram chooses how --speculate guesses, but"),
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support --speculate 1; remove it"),
        ({"rollout_replay": "there"}, "several tokens at once, but --rollout_replay draws nothing; leave one of them"),
        ({"speculate": "-1"}, "--speculate expects the number of tokens to guess, 0 to 8, or auto, got '-1'"),
        ({"speculate": "often"}, "--speculate expects the number of tokens to guess, 0 to 8, or auto, got 'often'"),
    ],
)
def test_what_guesses_cannot_go_with(given, said):
    with pytest.raises(ThreestepError, match=said):
        names_of(**{"speculate": "1", "mtp_num_layers": 1, **given})


def test_what_is_guessed():
    found = [names_of(speculate=given, mtp_num_layers=1).loop for given in ("0", "3", "auto")]
    assert [loop and loop.how for loop in found] == [None, Speculation(3), Speculation(1, is_auto=True)]
    named, without_head = names_of(speculate="2", speculate_by="ngram").loop, names_of(speculate="2").loop
    assert named.how == without_head.how == Speculation(2, by="ngram")
    assert named.choices() == []
    assert without_head.choices() == [("speculate_by", "ngram", "there is no head", None)]
    with pytest.raises(
        ThreestepError, match=("--speculate 2 does not work with prompts that have images: it can guess only the")
    ):
        beside_images(speculate="2", speculate_by="ngram")


def ways(pace: Pace, count: int, guessing: float, plain: float) -> tuple[list[bool], list[int]]:
    """Which of `count` rollouts were by guesses, at these seconds a token, and after which the verdict changed."""
    found, changed = [], []
    for place in range(count):
        way = pace.guesses_now((1,))
        if pace.note((1,), way, 10 * (guessing if way else plain), 10):
            changed.append(place)
        found.append(way)
    return found, changed


def test_guesses_that_do_not_pay_are_left_out_until_they_do():
    pace = Pace(is_auto=True)
    found, changed = ways(pace, 40, 2.0, 1.0)
    assert found[:6] == [True, False] * 3 and changed == [5] and pace.speedup == 0.5
    assert sum(found[6:]) == 2  # measured again, every 16th
    assert pace.guesses_now((2,)) and pace.guesses_now((1,)) is False  # kinds are measured apart
    pace.note((1,), False, 10.0, 10)
    found, changed = ways(pace, 40, 0.5, 1.0)
    assert len(changed) == 1 and all(found[changed[0] + 1 :][:8]) and pace.speedup == 2.0
    found, changed = ways(Pace(is_auto=False), 40, 2.0, 1.0)  # asked for: they stay, and are measured
    assert changed == [5] and found[6:].count(False) == 2


def test_what_is_known_is_saved():
    pace, other = Pace(is_auto=True), Pace(is_auto=True)
    kinds = ((3, 1.0, 5), (4, 0.0, 5))
    for place in range(9):
        pace.note(kinds[place % 2], pace.guesses_now(kinds[place % 2]), 1.0 + place, 10)
    other.load_state_dict(json.loads(json.dumps(pace.state_dict())))
    assert other.state_dict() == pace.state_dict() != []
    for _ in range(40):
        ways = [each.guesses_now(kinds[0]) for each in (pace, other)]
        assert ways[0] == ways[1]
        assert pace.note(kinds[0], ways[0], 2.0 - ways[0], 1) == other.note(kinds[0], ways[0], 2.0 - ways[0], 1)


def test_rounds_of_few_rows_guess_where_that_is_faster():
    """A round takes 1 second without guesses. By guesses it takes 1.1 at 4 rows, 1.6 at 32, and gives 1.5 tokens."""
    clock = SimpleNamespace(now=0.0)
    pace = RoundPace(is_auto=True, clock=lambda: clock.now)
    pace.end(3)  # of the prompts, which nothing began

    def ways(rows: int, rounds: int) -> list[bool]:
        found = []
        for _ in range(rounds):
            found.append(pace.begin(rows))
            clock.now += (1.1 if rows < 8 else 1.6) if found[-1] else 1.0
            pace.end(rows * 3 // 2 if found[-1] else rows)
        return found

    assert ways(4, 8) == ways(32, 8) == [True, False] * 4  # both are tried four times
    assert ways(4, 60).count(False) == 2 and ways(32, 60).count(True) == 2  # and then one of 32 checks
    assert ways(5, 1) == [True]  # of about as many rows
    always = RoundPace(clock=lambda: clock.now)
    assert always.begin(32) and always.begin(32) and not always._known


def test_frequent_tokens():
    """Of 1,001 tokens 995 are 3, 9 and 7, which cover 99 %, as no two do; with those of the prompts, in order."""
    frequent, prompt = FrequentTokens(), torch.tensor([5, 2, 5])
    assert frequent.among(prompt) is None
    drawn = [3] * 600 + [9] * 300 + [7] * 95 + [1] * 5
    plain = roll(tiny_causal_lm("llama"), replace(PLAIN, max_new_tokens=1), prompts((3, 2)))
    lengths_B, ids_BR = torch.tensor([len(drawn), 1]), torch.tensor([drawn, [11] * len(drawn)])
    frequent.note(replace(plain, response_ids_BR=ids_BR, response_lengths_B=lengths_B), 64)
    assert frequent.among(prompt).tolist() == [2, 3, 5, 7, 9]
    assert frequent.among(torch.arange(40)) is None  # too many
    frequent.note(replace(plain, response_ids_BR=ids_BR + 1, response_lengths_B=lengths_B), 64)
    assert frequent.among(prompt).tolist() == [2, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_few_logits(family):
    model = copy.deepcopy(tiny_causal_lm(family))
    states_AH = torch.randn(3, model.get_output_embeddings().weight.shape[1])
    among_S, all_AV = torch.tensor([0, 5, 9]), FewLogits(model)(states_AH)
    assert all_AV.shape[1] == vocabulary_of(model)
    torch.testing.assert_close(FewLogits(model, among_S)(states_AH), all_AV[:, among_S])
    # Of a layer that is more than its weight, all are computed.
    model.set_output_embeddings(type("Odd", (torch.nn.Linear,), {})(states_AH.shape[1], vocabulary_of(model)))
    assert FewLogits(model, among_S).among_S is None


def test_what_is_taken_back_leaves_no_trace():
    model, generator = tiny_causal_lm("llama"), torch.Generator().manual_seed(5)
    ids_BP = torch.randint(3, VOCABULARY, (3, 4), generator=generator)
    mask_BP = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    rows = KeptRows(model.base_model, mask_BP, 40)
    held = [ids_P[mask_P].tolist() for ids_P, mask_P in zip(ids_BP, mask_BP, strict=True)]
    with torch.no_grad():
        rows.prefill((mask_BP.long().cumsum(-1) - 1).clamp(min=0), input_ids=ids_BP)
        for kept in ([1, 3, 2], [1, 1, 1], [2, 3, 1], [3, 2, 2]):
            given_AQ = torch.randint(3, VOCABULARY, (len(held), 3), generator=generator)
            states_AQH = rows.give(3, input_ids=given_AQ)
            kept = kept[: len(held)]
            rows.keep(torch.tensor(kept), max(kept))
            for row, (count, ids) in enumerate(zip(kept, given_AQ.tolist(), strict=True)):
                alone_QH = model.base_model(input_ids=torch.tensor([[*held[row], *ids]]))[0][0, -3:]
                torch.testing.assert_close(states_AQH[row], alone_QH, rtol=0, atol=1e-4)
                held[row] += ids[:count]
            if len(held) == 3:
                rows.leave(moves_when_leaving([True, False, False], torch.device("cpu")))
                held = [held[2], held[1]]
        before = rows.give(1, input_ids=torch.tensor([[7], [8]]))
        rows.keep_all()
        rows.take_back(1)
        torch.testing.assert_close(rows.give(1, input_ids=torch.tensor([[7], [8]])), before)
    # Columns that no row kept are cut off: 4 + 3 + 1 + 3 + 3, and the last.
    assert rows._cache.layers[0].keys.shape[2] == 15


def test_the_rows_of_guesses_read_prompts_in_parts_too():
    model, (ids_BP, mask_BP) = tiny_causal_lm("llama", torch.float64), prompts(PADDED)
    positions_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    found = []
    for part in (None, 6):
        rows = KeptRows(model.base_model, mask_BP, 40, prefill_tokens=part)
        with torch.no_grad():
            states_BPH = rows.prefill(positions_BP, input_ids=ids_BP)
            found.append((states_BPH[mask_BP], rows.give(2, input_ids=ids_BP[:, -2:])))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)


def test_what_followed_last_is_guessed():
    """Two samples of one prompt and two of another, which share tables; rows move together when others leave."""
    ids_BP = torch.tensor([[7, 8, 9, 5, 6, 7, 8], [0, 0, 0, 1, 2, 3, 1]])
    mask_BP = torch.tensor([[1] * 7, [0] * 3 + [1] * 4]).bool()
    rows = NgramRows(RolloutRequest(ids_BP, mask_BP, PLAIN, range(4), 2), 2)
    found_AK = rows.guess(torch.tensor([[9], [9], [2], [4]]), torch.ones(4).long())
    # 7 8 9 was followed by 5 6; 3 1 2 by nothing, but 1 2 by 3, and 2 3 by 1.
    assert found_AK.tolist() == [[5, 6], [5, 6], [3, 1], [NOTHING, NOTHING]]
    found_AK = rows.guess(torch.tensor([[4, 0], [5, 6], [3, 1], [4, 4]]), torch.tensor([1, 2, 2, 2]))
    # 2 3 1 was followed by 2 in the one sample and, later, by 4 in the other, and 3 1 4 by 4.
    assert found_AK.tolist() == [[NOTHING, NOTHING], [7, 8], [4, 4], [4, 4]]
    rows.leave(moves_when_leaving([True, True, False, False], torch.device("cpu")))
    assert rows.guess(torch.tensor([[1], [1]]), torch.ones(2).long()).shape == (2, 0)


def test_few_rows_with_a_guess_do_not_guess():
    ids_BP = torch.tensor([[7, 8, 9, 5, 7, 8]])
    for samples, width in ((4, 1), (5, 0)):
        rows = NgramRows(RolloutRequest(ids_BP, ids_BP.bool(), PLAIN, range(samples), samples), 1)
        drawn_A1 = torch.tensor([[9], *([row] for row in range(20, 19 + samples))])
        assert rows.guess(drawn_A1, torch.ones(samples).long()).shape == (samples, width)
