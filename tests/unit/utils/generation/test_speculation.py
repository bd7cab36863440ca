"""Rollouts by guesses: the tokens are those of a rollout without, whether the guesses are right or wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.test_hf import GREEDY, PLAIN, frequent_token, prompts, responses, roll, spelt
from training.utils.generation import speculation
from training.utils.generation.bad_words import BadWords
from training.utils.generation.base import RolloutRequest
from training.utils.generation.speculation import GuessCounts, drawn_by_guesses
from training.utils.generation.stop_strings import stop_strings
from training.utils.mtp.head import new_head

LENGTHS = (3, 11, 1, 7, 5, 9, 2, 4, 6, 8)
KINDS = {
    "plain": PLAIN,
    "temperature": replace(PLAIN, temperature=0.7),
    "top_k": replace(PLAIN, top_k=5),
    "top_p": replace(PLAIN, top_p=0.8),
    "min_p": replace(PLAIN, min_p=0.1),
    "greedy": GREEDY,
}


class _Oracle:
    """In place of a head's draws: the tokens of `rollout`, of which every third is wrong."""

    def __init__(self, rollout, wrong_every: int = 3) -> None:
        self._ids_BR = torch.nn.functional.pad(rollout.response_ids_BR, (0, 20))
        self._wrong_every = wrong_every

    def __call__(self, draws, logits_AV):
        place = len(draws._recent) - 1
        places_A = draws._starts_A + place
        token_A = self._ids_BR[draws._rows_A, places_A]
        token_A = torch.where((draws._rows_A + places_A) % self._wrong_every == 0, 3 + (token_A + 1) % 60, token_A)
        recent_AK = draws._recent[-1]
        draws._recent.append(None if recent_AK is None else BadWords.after(recent_AK, token_A))
        return token_A


def both(model, how, samples, guesses, monkeypatch=None, head_seed=0):
    """The rollout without guesses, that by them, and their counts."""
    ids_BP, mask_BP = prompts(LENGTHS)
    seeds = list(range(len(ids_BP) * samples))
    plain = roll(model, how, (ids_BP, mask_BP), seeds, samples, spelt)
    if monkeypatch is not None:
        oracle = _Oracle(plain)
        monkeypatch.setattr(speculation._Draws, "next", lambda draws, logits_AV: oracle(draws, logits_AV))
    counts, head = GuessCounts(), new_head(model, 1, head_seed).eval()
    request = RolloutRequest(ids_BP, mask_BP, how, seeds, samples)
    with torch.no_grad():
        return plain, drawn_by_guesses(model, head, guesses, request, stop_strings(how, spelt), counts), counts


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
    how = replace(how, end_token_id=frequent_token(free), stop=(spelt(responses(free)[2][6:8]),))
    plain, drawn, counts = both(model, how, 3, guesses, monkeypatch)
    assert_same(plain, drawn)
    assert len(plain.response_lengths_B.unique()) > 2 and not plain.ended_B.all()
    assert counts.tokens > 1.4 * counts.forwards and counts.guesses > counts.accepted > 0


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_head_that_knows_nothing_changes_nothing(family):
    plain, drawn, counts = both(tiny_causal_lm(family), replace(PLAIN, max_new_tokens=12), 1, 2)
    assert_same(plain, drawn)
    assert counts.accepted < counts.guesses / 2


def test_guesses_are_drawn_as_the_model_draws(monkeypatch):
    """A head that is given the model's own logits is right every time, at a temperature with cuts and banned words."""
    model = tiny_causal_lm("llama")
    how = replace(PLAIN, max_new_tokens=12, temperature=0.8, top_p=0.9, bad_words=((5,), (7, 9)))
    ids_BP, mask_BP = prompts(LENGTHS)
    plain = roll(model, how, (ids_BP, mask_BP))
    drawn_next = speculation._Draws.next

    def next_of_the_model(draws, logits_AV):
        found = []
        for row, start in zip(draws._rows_A.tolist(), draws._starts_A.tolist(), strict=True):
            ids = torch.cat([ids_BP[row][mask_BP[row]], plain.response_ids_BR[row, :start]])
            found.append(model(input_ids=ids[None]).logits[0, -1])
        return drawn_next(draws, torch.stack(found))

    monkeypatch.setattr(speculation._Draws, "next", next_of_the_model)
    head, counts = new_head(model, 1, 0).eval(), GuessCounts()
    request = RolloutRequest(ids_BP, mask_BP, how, list(range(len(ids_BP))))
    with torch.no_grad():
        assert_same(plain, drawn_by_guesses(model, head, 1, request, None, counts))
    # The last guess of a row may be of a token beyond its length, which nobody draws.
    assert counts.accepted >= counts.guesses - len(ids_BP) and counts.tokens >= 1.8 * (counts.forwards - len(ids_BP))


def test_the_heads_entries_are_those_it_is_trained_on():
    """What the head reads in a rollout, prompts padded and tokens taken back, gives the states of its training."""
    from training.utils.layout.documents import join, plain
    from training.utils.layout.mtp_entries import mtp_entries
    from training.utils.layout.rows import packed_rows
    from training.utils.models.token_model import PolicyModel

    model = tiny_causal_lm("llama")
    head, seen = new_head(model, 1, 0).eval(), {}
    drawn_next = speculation._Draws.next

    def noted(draws, logits_AV):
        for row, start, logits_V in zip(draws._rows_A.tolist(), draws._starts_A.tolist(), logits_AV, strict=True):
            seen[row, start] = torch.log_softmax(logits_V, -1)
        return drawn_next(draws, logits_AV)

    ids_BP, mask_BP = prompts(LENGTHS)
    request = RolloutRequest(ids_BP, mask_BP, replace(PLAIN, max_new_tokens=12), list(range(len(ids_BP))))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(speculation._Draws, "next", noted)
        rollout = drawn_by_guesses(model, head, 1, request, None, GuessCounts())
    for row in range(len(ids_BP)):
        prompt, response = rollout.prompt_of(row), rollout.response_of(row)
        rows = packed_rows([[plain(join(prompt, response))]], 0, with_before=True)
        with torch.no_grad():
            states = PolicyModel(model)(rows, with_states=True).states
            entries = mtp_entries(rows, 1)
            (own_MH,) = head(states.hidden_LH, states.embeddings_LH, entries)
            own_MV = torch.log_softmax(model.get_output_embeddings()(own_MH), -1)
        places = entries[0].rows.predictor_M + 1 - len(prompt)  # of the response
        known = {int(place): logits_V for place, logits_V in zip(places, own_MV, strict=True)}
        compared = [(seen[row, place], known[place]) for place in known if (row, place) in seen]
        assert len(compared) > 5
        for found_V, expected_V in compared:
            torch.testing.assert_close(found_V, expected_V, rtol=0, atol=2e-5)


def test_figures():
    assert GuessCounts().figures() == {}
    counts = GuessCounts(forwards=20, tokens=30, guesses=16, accepted=10)
    assert counts.figures() == {"rollout/guesses_accepted": 0.625, "rollout/tokens_per_forward": 1.5}
