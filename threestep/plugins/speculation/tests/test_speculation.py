"""Rollouts by guesses: the tokens are those of a rollout without, whether the guesses are right or wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import GREEDY, PLAIN, frequent_token, prompts, responses, roll, spelt
from threestep.plugins.mtp.head import new_head
from threestep.plugins.speculation import speculation
from threestep.plugins.speculation.pace import RoundPace
from threestep.plugins.speculation.speculation import GuessCounts, Guesses, drawn_by_guesses
from training.utils.contracts.rollout_engine import Ends, RolloutRequest
from training.utils.generation.decoding.drawn import stop_strings

LENGTHS = (3, 11, 1, 7, 5, 9, 2, 4, 6, 8)
KINDS = {
    "plain": PLAIN,
    "temperature": replace(PLAIN, temperature=0.7),
    "top_k": replace(PLAIN, top_k=5),
    "top_p": replace(PLAIN, top_p=0.8),
    "min_p": replace(PLAIN, min_p=0.1),
    "greedy": GREEDY,
}


def oracle(rollout):
    """In place of a head's guesses: the tokens of `rollout`, of which every third is wrong."""
    ids_BR = torch.nn.functional.pad(rollout.response_ids_BR, (0, 20))

    def guess(rows, token_AQ, fresh_A, states_AQH, draws):
        row_A1, places_AK = draws._rows_A.unsqueeze(1), draws._places_A.unsqueeze(1) + torch.arange(rows._count)
        token_AK = ids_BR[row_A1, places_AK]
        return torch.where((row_A1 + places_AK) % 3 == 0, 3 + (token_AK + 1) % 60, token_AK)

    return guess


class EverySecond(RoundPace):
    """Every second round guesses."""

    def begin(self, rows):
        self.count = getattr(self, "count", 0) + 1
        return self.count % 2 == 1


def both(model, how, samples, guesses, monkeypatch=None, **given):
    """The rollout without guesses, that by them, and their counts."""
    ids_BP, mask_BP = prompts(LENGTHS)
    seeds = list(range(len(ids_BP) * samples))
    plain = roll(model, how, (ids_BP, mask_BP), seeds, samples, spelt)
    if monkeypatch is not None:
        monkeypatch.setattr(speculation._HeadRows, "guess", oracle(plain))
    counts, guessed = GuessCounts(), Guesses(guesses, **{"head": new_head(model, 1, 0).eval(), **given})
    request = RolloutRequest(ids_BP, mask_BP, how, seeds, samples)
    with torch.no_grad():
        return plain, drawn_by_guesses(model, guessed, request, stop_strings(how, spelt), counts=counts), counts


def assert_same(plain, drawn):
    assert responses(drawn) == responses(plain)
    assert torch.equal(drawn.ended_B, plain.ended_B) and torch.equal(drawn.prompt_ids_BP, plain.prompt_ids_BP)
    torch.testing.assert_close(drawn.sampled_logprobs_BR, plain.sampled_logprobs_BR, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "guesses"), [*((kind, 1) for kind in KINDS), ("top_p", 3)])
def test_the_tokens_are_those_of_a_rollout_without(kind, guesses, monkeypatch):
    """30 sequences of 10 prompts, with ends, stop strings and banned words inside of what is guessed."""
    model = tiny_causal_lm("llama")
    how = replace(KINDS[kind], max_new_tokens=25)
    said = responses(roll(model, how, prompts(LENGTHS)))
    how = replace(how, bad_words=(tuple(said[5][3:5]), (said[1][2],)))
    free = roll(model, how, prompts(LENGTHS))
    how = replace(how, end_token_id=frequent_token(free), ends=Ends((spelt(responses(free)[2][6:8]),)))
    plain, drawn, counts = both(model, how, 3, guesses, monkeypatch)
    assert_same(plain, drawn)
    assert len(plain.response_lengths_B.unique()) > 2 and not plain.ended_B.all()
    assert counts.tokens > 1.4 * counts.forwards and counts.guesses > counts.accepted > 0


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_head_that_knows_nothing_changes_nothing(family):
    plain, drawn, counts = both(tiny_causal_lm(family), replace(PLAIN, max_new_tokens=12), 1, 2)
    assert_same(plain, drawn)
    assert counts.accepted < counts.guesses / 2


@pytest.mark.parametrize(("kind", "guesses"), [("greedy", 3), ("plain", 1)])
def test_guesses_without_a_head(kind, guesses):
    """A greedy tiny model repeats itself a little; with banned words, so that n-grams guess some of these too."""
    how = replace(KINDS[kind], max_new_tokens=40)
    model = tiny_causal_lm("llama")
    how = replace(how, bad_words=(tuple(responses(roll(model, how, prompts(LENGTHS)))[5][3:5]),))
    plain, drawn, counts = both(model, how, 3, guesses, head=None)
    assert_same(plain, drawn)
    assert kind != "greedy" or counts.accepted > 30
    assert counts.guesses < counts.forwards * guesses  # of rows without a guess, none is counted


@pytest.mark.parametrize("with_head", [True, False])
def test_rounds_may_guess_nothing(with_head, monkeypatch):
    how = replace(GREEDY, max_new_tokens=40)
    given = {} if with_head else {"head": None}
    model = tiny_causal_lm("llama")
    plain, drawn, counts = both(model, how, 2, 2, monkeypatch if with_head else None, pace=EverySecond(), **given)
    assert_same(plain, drawn)
    assert 0 < counts.accepted < counts.guesses <= counts.forwards


def test_a_head_may_guess_among_a_few_tokens(monkeypatch):
    """Whatever it cannot guess is drawn; what it guesses is among them, banned words left out."""
    guessed, guess = [], speculation._HeadRows.guess

    def noted(*given):
        guessed.append(guess(*given))
        return guessed[-1]

    monkeypatch.setattr(speculation._HeadRows, "guess", noted)
    among_S, how = torch.arange(5, 60, 4), replace(PLAIN, max_new_tokens=20, bad_words=((9,), (61,)))
    assert_same(*both(tiny_causal_lm("llama"), how, 1, 2, among_S=among_S)[:2])
    assert {*torch.cat(guessed).flatten().tolist()} <= {*among_S.tolist()} - {9}


def test_guesses_are_drawn_as_the_model_draws(monkeypatch):
    """A head that is given the model's own logits is right every time, at a temperature with cuts and banned words."""
    model = tiny_causal_lm("llama")
    how = replace(PLAIN, max_new_tokens=12, temperature=0.8, top_p=0.9, bad_words=((5,), (7, 9)))
    ids_BP, mask_BP = prompts(LENGTHS)
    plain = roll(model, how, (ids_BP, mask_BP))

    def guess(rows, token_AQ, fresh_A, states_AQH, draws):
        found = []
        for row, place in zip(draws._rows_A.tolist(), draws._places_A.tolist(), strict=True):
            ids = torch.cat([ids_BP[row][mask_BP[row]], plain.response_ids_BR[row, :place]])
            found.append(model(input_ids=ids[None]).logits[0, -1])
        return draws.next(torch.stack(found))[0].unsqueeze(1)

    monkeypatch.setattr(speculation._HeadRows, "guess", guess)
    guessed, counts = Guesses(1, new_head(model, 1, 0).eval()), GuessCounts()
    request = RolloutRequest(ids_BP, mask_BP, how, list(range(len(ids_BP))))
    with torch.no_grad():
        assert_same(plain, drawn_by_guesses(model, guessed, request, None, counts=counts))
    # The last guess of a row may be of a token beyond its length, which nobody draws.
    assert counts.accepted >= counts.guesses - len(ids_BP) and counts.tokens >= 1.8 * (counts.forwards - len(ids_BP))


class _Noting:
    """Draws that note the log-probabilities of each row and place."""

    def __init__(self, draws, seen) -> None:
        self._draws, self._seen = draws, seen

    def next(self, logits_AV, among_S):
        rows, places = self._draws._rows_A.tolist(), self._draws._places_A.tolist()
        self._seen.update(zip(zip(rows, places, strict=True), torch.log_softmax(logits_AV, -1), strict=True))
        return self._draws.next(logits_AV, among_S)


@pytest.mark.parametrize(("are_right", "pace"), [(False, RoundPace), (True, RoundPace), (True, EverySecond)])
def test_the_heads_entries_are_those_it_is_trained_on(are_right, pace, monkeypatch):
    """What the head reads in a rollout, prompts padded and tokens taken back, gives the states of its training. Of two
    tokens at once only the last has an entry, and those of rounds without guesses have none; here, every guess is
    wrong, or two of three are right."""
    model, seen, drawn = tiny_causal_lm("llama"), {}, speculation._HeadRows.guess
    head, how = new_head(model, 1, 0).eval(), replace(PLAIN, max_new_tokens=12, bad_words=((1,),))
    ids_BP, mask_BP = prompts(LENGTHS)
    said = oracle(roll(model, how, (ids_BP, mask_BP)))

    def guess(rows, *given):
        *read, draws = given
        guess_AK = drawn(rows, *read, _Noting(draws, seen))
        draws._places_A = draws._places_A - 1  # before the guess, as it was given
        return said(rows, *given) if are_right else torch.ones_like(guess_AK)

    monkeypatch.setattr(speculation._HeadRows, "guess", guess)
    request = RolloutRequest(ids_BP, mask_BP, how, list(range(len(ids_BP))))
    with torch.no_grad():
        rollout = drawn_by_guesses(model, Guesses(1, head, pace=pace()), request, None, counts=GuessCounts())
        for row in range(len(ids_BP)):
            prompt, ids_T = rollout.prompt_of(row), torch.cat([rollout.prompt_of(row), rollout.response_of(row)])
            places = sorted(place for other, place in seen if other == row)
            assert len(places) == 11 if not are_right else 3 < len(places) < 11
            # Entry t joins the embedding of token t with the state at token t - 1.
            kept = torch.tensor([*range(1, len(prompt)), *(len(prompt) + place - 1 for place in places)])
            states_TH = model.base_model(input_ids=ids_T[None])[0][0]
            entries_TH = head.depths[0].joined(model.get_input_embeddings()(ids_T[kept]), states_TH[kept - 1])
            # With a mask, or transformers would take a jump of positions for a packed sequence's end.
            given = {"position_ids": kept[None], "attention_mask": torch.ones_like(kept)[None]}
            own_TH = head.depths[0].trunk(inputs_embeds=entries_TH[None], use_cache=False, **given)[0][0]
            expected = torch.log_softmax(model.get_output_embeddings()(own_TH[-len(places) :]), -1)
            found = torch.stack([seen[row, place] for place in places])
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_figures():
    assert GuessCounts().figures() == {}
    counts = GuessCounts(forwards=20, tokens=30, guesses=16, accepted=10)
    assert counts.figures() == {"rollout/guesses_accepted": 0.625, "rollout/tokens_per_forward": 1.5}
