"""vLLM's responses beside those of the transformers engine in float32, also after each of 20 updates."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.distributed.launch import run_ranks
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import (
    GREEDY,
    PAD,
    PLAIN,
    frequent_token,
    prompts,
    responses,
    roll,
    spelt,
)
from threestep.plugins.environments.tests.turns.test_conversations import END, SAMPLING, converse
from threestep.plugins.hybrid.engine import _logprobs
from threestep.plugins.vllm.tests.vllm.conftest import SHAPES, started
from threestep.plugins.vllm.tests.vllm.sync_program import BUCKET_ELEMENTS, CASES
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutRequest, Sampling

CUT = {"top_k": 20, "top_p": 0.8, "min_p": 0.02}


def draw(engine, model, how: Sampling, samples: int = 1, seed: int = 0, batch=None) -> Rollout:
    ids_BP, mask_BP = prompts() if batch is None else batch
    seeds = range(seed, seed + len(ids_BP) * samples)
    return engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, seeds, samples))


def of_family(engines, family: str):
    model = tiny_causal_lm(family, **SHAPES[family])
    draw(engines[family], model, replace(GREEDY, max_new_tokens=1))
    return engines[family], model


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, engines):
    """An engine that has started, and a model of its family."""
    return of_family(engines, request.param)


@pytest.fixture(scope="module")
def llama(engines):
    return of_family(engines, "llama")


def test_greedy_rollouts_are_those_of_hf(pair):
    engine, model = pair
    how = replace(GREEDY, end_token_id=frequent_token(roll(model, GREEDY)))
    expected, got = roll(model, how), draw(engine, model, how)
    assert responses(got) == responses(expected)
    for name in ("prompt_ids_BP", "prompt_mask_BP", "response_ids_BR", "response_lengths_B", "ended_B"):
        left, right = getattr(got, name), getattr(expected, name)
        assert torch.equal(left, right) and left.dtype == right.dtype, name
    torch.testing.assert_close(got.sampled_logprobs_BR, expected.sampled_logprobs_BR, rtol=0, atol=1e-4)
    assert got.seconds > 0


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_logprobs_are_the_training_forwards_before_all_cuts(pair, cut):
    engine, model = pair
    how = replace(PLAIN, temperature=0.7, end_token_id=frequent_token(roll(model, GREEDY)), **cut)
    rollout = draw(engine, model, how, samples=2)
    expected_M = _logprobs(model, rollout, how)
    torch.testing.assert_close(rollout.sampled_logprobs_BR[rollout.response_mask_BR], expected_M, rtol=0, atol=1e-4)
    assert (rollout.sampled_logprobs_BR[~rollout.response_mask_BR] == 0).all()
    assert (rollout.response_ids_BR[~rollout.response_mask_BR] == PAD).all()
    ended = [response[-1] == how.end_token_id for response in responses(rollout)]
    assert rollout.ended_B.tolist() == ended and 0 < sum(ended) < 16


def test_a_response_follows_its_prompt_and_its_seed(llama):
    engine, model = llama
    first = responses(draw(engine, model, PLAIN, samples=2))
    assert (
        responses(draw(engine, model, PLAIN, samples=2)) == first != responses(draw(engine, model, PLAIN, 2, seed=50))
    )
    assert len({tuple(response) for response in first}) == 16
    ids_BP, mask_BP = prompts()  # the third prompt's second sample by itself
    (alone,) = responses(engine.roll_out(model, RolloutRequest(ids_BP[2:3], mask_BP[2:3], PLAIN, [5])))
    assert alone == first[5]


def test_tokens_are_drawn_as_often_as_they_are_likely(llama):
    """2,000 first tokens of one prompt; a token of probability p is drawn 2000 p +- 5 standard deviations times."""
    engine, model = llama
    ids_BP, mask_BP = prompts((5,))
    how = replace(PLAIN, max_new_tokens=1, temperature=0.5)
    drawn_B = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, range(2000), 2000)).response_ids_BR[:, 0]
    with torch.no_grad():
        probability_V = torch.softmax(model(ids_BP).logits[0, -1] / 0.5, dim=-1)
    count_V = torch.bincount(drawn_B, minlength=len(probability_V))
    deviation_V = (2000 * probability_V * (1 - probability_V)).sqrt().clamp(min=1.0)
    assert ((count_V - 2000 * probability_V).abs() < 5 * deviation_V).all()


def test_only_tokens_inside_the_cuts_are_drawn(llama):
    engine, model = llama
    ids_BP, mask_BP = prompts((5,))
    with torch.no_grad():
        order_V = model(ids_BP).logits[0, -1].argsort(descending=True)
    how = replace(PLAIN, max_new_tokens=1, top_k=3)
    rollout = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, range(200), 200))
    drawn = set(rollout.response_ids_BR[:, 0].tolist())
    assert drawn == set(order_V[:3].tolist())


def test_bad_words_are_never_completed(llama):
    engine, model = llama
    free = responses(draw(engine, model, GREEDY))
    words = ((free[0][0],), tuple(free[1][3:5]))
    how = replace(GREEDY, bad_words=words)
    rollout = draw(engine, model, how)
    for response in responses(rollout):
        assert words[0][0] not in response
        assert words[1] not in zip(response, response[1:], strict=False)
    assert responses(rollout) == responses(roll(model, how))
    # The distribution is the whole one: a ban takes nothing from the others' log-probabilities.
    torch.testing.assert_close(
        rollout.sampled_logprobs_BR[rollout.response_mask_BR], _logprobs(model, rollout, how), rtol=0, atol=1e-4
    )


def test_stop_strings_end_a_response_with_the_token_that_completes_them(llama):
    engine, model = llama
    free = responses(draw(engine, model, GREEDY))
    how = replace(GREEDY, ends=Ends((spelt(free[2][4:6]),)))
    got, expected = draw(engine, model, how), roll(model, how, decode=spelt)
    assert responses(got) == responses(expected) and torch.equal(got.ended_B, expected.ended_B)
    assert 0 < int(got.ended_B.sum()) < 8


def test_the_samples_of_a_prompt_share_its_cache_blocks(llama, monkeypatch):
    """A block of 32 tokens and one token more: only the first sample computes the block. 33 + 7 tokens in the first
    step, then 8 in each."""
    engine, model = llama
    scheduler = engine._vllm.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, counts = scheduler.schedule, []

    def counted(*words):
        scheduled = schedule(*words)
        counts.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", counted)
    draw(engine, model, replace(PLAIN, max_new_tokens=4), samples=8, batch=prompts((33,)))
    assert counts[:4] == [40, 8, 8, 8]


def test_more_prompts_than_fit_one_forward(llama):
    """300 prompts of 33 tokens: vLLM takes 8,192 tokens at a time, and draws as it does for each alone."""
    engine, model = llama
    ids_BP, mask_BP = prompts((33,) * 300)
    how = replace(PLAIN, max_new_tokens=3)
    rollout = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, range(300)))
    for row in (0, 250, 299):
        request = RolloutRequest(ids_BP[row : row + 1], mask_BP[row : row + 1], how, [row])
        (alone,) = responses(engine.roll_out(model, request))
        assert responses(rollout)[row] == alone


def test_other_programs_see_nothing_of_it(llama):
    engine, model = llama
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    threads = torch.get_num_threads()
    new = started()
    responses(draw(new, model, replace(PLAIN, max_new_tokens=2)))
    assert torch.equal(torch.random.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_weights_that_did_not_arrive_are_found_out(llama, monkeypatch):
    engine, model = llama
    reload = engine._vllm.llm.collective_rpc

    def altered(method, kwargs):
        tensors = kwargs["weights_iterator"]
        wrong = ((name, tensor + 1 if "1.mlp.down" in name else tensor) for name, tensor in tensors)
        return reload(method, kwargs={"weights_iterator": wrong})

    monkeypatch.setattr(engine._vllm.llm, "collective_rpc", altered)
    with pytest.raises(ThreestepError) as told:
        draw(engine, model, PLAIN)
    assert str(told.value) == (
        "vLLM's weights differ from those it was sent, in layer 1: it loads checkpoints of this architecture "
        "differently from how transformers stores them; use --rollout_engine hf"
    )


def test_a_prompt_that_is_too_long_is_told(llama):
    engine, model = llama
    with pytest.raises(ThreestepError) as told:
        draw(engine, model, replace(PLAIN, max_new_tokens=60))
    assert str(told.value) == (
        "vLLM was started for sequences of up to 64 tokens (--max_prompt_seq_len and --max_answer_seq_len), but a "
        "prompt of 11 tokens leaves no room for a response of 60; raise these limits, or shorten the prompt"
    )


def test_too_small_a_cache_is_told():
    with pytest.raises(
        ThreestepError, match="^vLLM could not start with LlamaForCausalLM: ValueError: .*cache"
    ) as told:
        draw(started(vllm_cache_gib=1e-5), tiny_causal_lm("llama", **SHAPES["llama"]), PLAIN)
    assert "change --vllm_cache_gib" in str(told.value) and "\n" not in str(told.value)


def test_an_architecture_that_vllm_does_not_know_is_told():
    class Unheard(LlamaForCausalLM):
        pass

    model = Unheard(tiny_causal_lm("llama", **SHAPES["llama"]).config)
    with pytest.raises(ThreestepError, match="^vLLM could not start with Unheard: .*Unheard.*--rollout_engine hf$"):
        draw(started(), model, PLAIN)


def test_an_engine_that_dies_is_told():
    engine, model = started(), tiny_causal_lm("llama", **SHAPES["llama"])
    draw(engine, model, PLAIN)

    def dies(self, **_):
        raise RuntimeError("kernel launch failed\nmore")

    engine._vllm.llm.llm_engine.engine_core.get_output = lambda: dies(None)
    with pytest.raises(ThreestepError) as told:
        draw(engine, model, PLAIN)
    assert str(told.value) == (
        "vLLM failed while generating responses: RuntimeError: kernel launch failed; the last checkpoint is intact: "
        "resume with --resume, or use --rollout_engine hf"
    )


@pytest.mark.parametrize("family", SHAPES)
def test_conversations_are_those_of_hf(engines, family):
    """Greedy, 8 of them. Each has a limit of its own: a long conversation with the room of a short one would be more
    than the 64 tokens that the engine was started for."""
    engine, model = of_family(engines, family)
    model.get_output_embeddings().weight.data[END] *= 3  # it likes to end a turn
    draw(engine, model, replace(GREEDY, max_new_tokens=1))
    sampling = replace(SAMPLING, temperature=0.0, max_new_tokens=50)
    vllms, partners = converse(model, (3, 11, 1, 7, 5, 9, 2, 4), 1, sampling=sampling, draws=engine)
    ours, others = converse(model, (3, 11, 1, 7, 5, 9, 2, 4), 1, sampling=sampling)
    assert responses(vllms) == responses(ours) and vllms.records == ours.records
    assert [partner.said for partner in partners] == [partner.said for partner in others]
    assert max(record.turns for record in ours.records) >= 3
    for name in ("ended_B", "inserted_BR"):
        assert torch.equal(getattr(vllms, name), getattr(ours, name)), name
    assert torch.equal(vllms.conversations.turn_rewards_BR, ours.conversations.turn_rewards_BR)
    torch.testing.assert_close(vllms.sampled_logprobs_BR, ours.sampled_logprobs_BR, rtol=0, atol=1e-4)


UPDATES = 20


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    tiny_causal_lm("qwen3", **SHAPES["qwen3"]).save_pretrained(folder)
    program = Path(__file__).with_name("sync_program.py")
    return run_ranks(program, request.param, [folder, UPDATES], timeout_seconds=840)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_follow_the_new_weights(reports, case):
    for report in reports:
        got = report[case]
        assert got["worst"] < 1e-4 < got["moved"], got
        assert got["sent"] == UPDATES, "sent once after each update"
        assert got["sent_again"] == 1, "and not again while nothing has changed"
        if CASES[case]["zero_stage"] == 3:
            # A bucket is full with the weight that fills it, and that one's adapters.
            assert 0 < got["most_gathered"] <= BUCKET_ELEMENTS + 2 * got["largest_weight"], got
