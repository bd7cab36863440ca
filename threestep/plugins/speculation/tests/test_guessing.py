"""An engine that guesses: what it refuses, switches off and says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_hf import GREEDY, PLAIN, prompts, responses
from threestep.plugins.environments.turns.conversations import ActingRollout, ConversationLimits
from threestep.plugins.mtp.head import new_head
from threestep.plugins.speculation import kept_rows
from threestep.plugins.speculation.guessing import Guessing
from threestep.plugins.speculation.settings import Speculation
from threestep.plugins.speculation.verified import why_not_verified
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import RolloutRequest
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
    assert (
        f"--speculate 2 {'pays' if pays else 'does not pay'}: " in sentence and "of its guesses are right" in sentence
    )
    # A model that is not lent brings no head.
    assert responses(engine.roll_out(model, request)) == expected and engine.figures().keys() <= {
        "rollout/speculation_speedup"
    }


@pytest.mark.parametrize(
    ("family", "said"), [("gemma2", "layers see the last tokens alone"), ("bloom", "makes its mas")]
)
def test_families_that_cannot_be_verified(family, said):
    model, own = known(family)
    model_head = new_head(known("llama")[0], 1, 0)

    def engine_for(how: Speculation):
        engine = TransformersRollout()
        engine.draw_by(Guessing(how, lambda: nullcontext(model_head), print))
        return engine

    with pytest.raises(
        ThreestepError, match=f"--speculate 1 verifies several tokens at once, which .* cannot: .*{said}"
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
    with pytest.raises(ThreestepError, match="which LlamaForCausalLM cannot: its head fails .RuntimeError: "):
        engine.check(nullcontext(model), own)
