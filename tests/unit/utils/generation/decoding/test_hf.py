"""Rollouts: transformers' own greedy responses, the training forward's log-probabilities, one seed a response."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.taped_step import WAITS
from tests.support.tiny_models import FAMILIES, PADDED_FAMILIES, VOCABULARY, tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutRequest, Sampling
from training.utils.generation.decoding.decoding import MASKED, WAYS, Decoding
from training.utils.generation.decoding.hf import TransformersRollout, end_check_tokens
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel, Readout

PAD = 0
NEVER = VOCABULARY + 1  # an end token that no model here can draw
PLAIN = Sampling(max_new_tokens=12, temperature=1.0, top_k=0, top_p=1.0, end_token_id=NEVER, pad_token_id=PAD)
GREEDY = replace(PLAIN, temperature=0.0)


def prompts(lengths=(3, 11, 1, 7, 5, 9, 2, 4), seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids_BP = torch.full((len(lengths), width), PAD)
    mask_BP = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids_BP[row, width - length :] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask_BP[row, width - length :] = True
    return ids_BP, mask_BP


def roll(model, how: Sampling, batch=None, seeds=None, samples: int = 1, decode=None) -> Rollout:
    ids_BP, mask_BP = prompts() if batch is None else batch
    seeds = list(range(len(ids_BP) * samples)) if seeds is None else seeds
    return TransformersRollout(decode).roll_out(model, RolloutRequest(ids_BP, mask_BP, how, seeds, samples))


def spelt(ids) -> str:
    """A letter a token: a tokenizer for these models."""
    return "".join(chr(ord("0") + index) for index in ids)


def shapes_of_inputs(model, run) -> tuple[Rollout, list[tuple[int, int]]]:
    """What `run()` gives, and (rows, tokens) of every forward in it."""
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rollout = run()
    hook.remove()
    return rollout, seen


def responses(rollout: Rollout) -> list[list[int]]:
    return [rollout.response_of(index).tolist() for index in range(len(rollout.response_lengths_B))]


def frequent_token(rollout: Rollout) -> int:
    """The token that most responses hold beyond their start: a good end token for the next rollout."""
    held_BV = torch.nn.functional.one_hot(rollout.response_ids_BR[:, 2:], VOCABULARY).amax(1)
    return int(held_BV.sum(0).argmax())


@pytest.mark.parametrize("family", [*FAMILIES, *PADDED_FAMILIES])
def test_greedy_responses_are_those_of_transformers(family):
    model = tiny_causal_lm(family)
    end = frequent_token(roll(model, GREEDY))
    rollout = roll(model, replace(GREEDY, end_token_id=end))
    ids_BP, mask_BP = prompts()
    generated = model.generate(
        ids_BP, attention_mask=mask_BP.long(), do_sample=False, max_new_tokens=12, eos_token_id=end, pad_token_id=PAD
    )[:, ids_BP.shape[1] :]
    for row, response in enumerate(responses(rollout)):
        expected = generated[row].tolist()
        expected = expected[: expected.index(end) + 1] if end in expected else expected
        assert response == expected
    assert len(set(rollout.response_lengths_B.tolist())) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_training_forward(family, temperature):
    """Left-padded prompts of different lengths, and rows that leave the batch: the cache must follow."""
    model = tiny_causal_lm(family)
    how = replace(PLAIN, temperature=temperature, max_new_tokens=20)
    how = replace(how, end_token_id=frequent_token(roll(model, how)))
    rollout = roll(model, how)
    lengths = rollout.response_lengths_B
    assert rollout.ended_B.sum() >= 2 and len(lengths.unique()) >= 2  # a quarter has ended: rows have left
    with torch.no_grad():
        logprobs_M = PolicyModel(model)(padded_rows(rollout.sequences(), PAD), Readout(temperature)).logprobs_M
    torch.testing.assert_close(rollout.sampled_logprobs_BR[rollout.response_mask_BR], logprobs_M, rtol=1e-5, atol=2e-5)
    assert not rollout.sampled_logprobs_BR[~rollout.response_mask_BR].any()
    assert (rollout.response_ids_BR[~rollout.response_mask_BR] == PAD).all()


def test_rows_leave_the_batch_and_the_last_takes_no_forward_with_it():
    """Finished rows cost nothing: each forward is of the rows that go on, and of no other."""
    model = tiny_causal_lm("llama")
    how = replace(PLAIN, max_new_tokens=80)
    how = replace(how, end_token_id=frequent_token(roll(model, how)))
    rollout, seen = shapes_of_inputs(model, lambda: roll(model, how))
    lengths_B = rollout.response_lengths_B
    assert rollout.ended_B.all() and seen[0] == (8, 11) and len(seen) == int(lengths_B.max()) < 80
    assert seen[1:] == [(int((lengths_B > step).sum()), 1) for step in range(1, len(seen))]


def test_looking_seldom_for_ends_gives_the_same_bits(monkeypatch, way=WAYS[0]):
    """Ends, stop strings and banned words inside of the tokens between two looks. To the bit where as many rows stand
    in the batch: a row that leaves later rounds the others' numbers otherwise, as any batch does."""

    class InThisWay(TransformersRollout):
        _way = way

    model = tiny_causal_lm("llama")
    how = replace(PLAIN, max_new_tokens=25)
    free = responses(roll(model, how))
    how = replace(how, end_token_id=frequent_token(roll(model, how)), top_p=0.95)
    how = replace(how, ends=Ends((spelt(free[2][9:11]),)), bad_words=(tuple(free[5][3:5]), (free[1][2],)))
    ids_BP, mask_BP = prompts()
    requests = {
        every: RolloutRequest(
            ids_BP, mask_BP, replace(how, ends=replace(how.ends, check_tokens=every)), list(range(16)), 2
        )
        for every in (1, 4, 7, 25)
    }
    first = InThisWay(spelt).roll_out(model, requests[1])
    assert len(first.response_lengths_B.unique()) >= 4 and not first.ended_B.all()
    for every, request in requests.items():
        drawn = InThisWay(spelt).roll_out(model, request)
        assert responses(drawn) == responses(first) and torch.equal(drawn.ended_B, first.ended_B), every
        torch.testing.assert_close(drawn.sampled_logprobs_BR, first.sampled_logprobs_BR, rtol=0, atol=2e-5)
    monkeypatch.setattr(Decoding, "drop", lambda self, token_A, over: token_A)
    first = InThisWay(spelt).roll_out(model, requests[1])
    for every, request in requests.items():
        drawn = InThisWay(spelt).roll_out(model, request)
        for name in ("response_ids_BR", "response_lengths_B", "sampled_logprobs_BR", "ended_B"):
            assert torch.equal(getattr(drawn, name), getattr(first, name)), (every, name)


def test_the_host_waits_once_a_look():
    """In a way whose masks are made once: no other operator reads a number back. On a GPU a look is every 8 tokens."""
    assert [end_check_tokens(torch.device(name)) for name in ("cpu", "cuda")] == [1, 8]
    model = tiny_causal_lm("llama")
    ids_BP, mask_BP = prompts()

    class Masked(TransformersRollout):
        _way = MASKED

    how = replace(PLAIN, bad_words=((5,), (6, 7)), top_k=20, min_p=0.01)
    waits = {}
    for most in (16, 32):
        request = RolloutRequest(
            ids_BP, mask_BP, replace(how, max_new_tokens=most, ends=Ends(check_tokens=8)), range(8)
        )
        with _Waits() as counted:
            Masked().roll_out(model, request)
        waits[most] = counted.found
    assert waits[16] == waits[32]  # `tolist` of the tokens is a copy, and no operator
    assert len(waits[32]) <= 6


class _Waits(TorchDispatchMode):
    """Notes each operator whose answer or shape the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator).removeprefix("aten.").split(".")[0]
        if name in WAITS:
            self.found.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "bloom", "mamba"])
def test_samples_of_a_prompt_share_its_forward(family):
    """Three samples a prompt: the prompts go through the model once, and every sample is what its seed draws alone."""
    model = tiny_causal_lm(family)
    how = replace(PLAIN, max_new_tokens=16)
    how = replace(how, end_token_id=frequent_token(roll(model, how)))
    ids_BP, mask_BP = prompts((3, 7, 5))
    rollout, seen = shapes_of_inputs(model, lambda: roll(model, how, (ids_BP, mask_BP), samples=3))
    assert seen[0] == (3, 7) and seen[1][0] > 3 and {tokens for _, tokens in seen[1:]} == {1}
    assert torch.equal(rollout.prompt_ids_BP, ids_BP[[0, 0, 0, 1, 1, 1, 2, 2, 2]])
    assert torch.equal(rollout.prompt_mask_BP, mask_BP[[0, 0, 0, 1, 1, 1, 2, 2, 2]])
    drawn = responses(rollout)
    assert len({tuple(response) for response in drawn}) == 9
    for row, response in enumerate(drawn):
        own = mask_BP[row // 3]
        alone = roll(model, how, (ids_BP[row // 3][own][None], mask_BP[row // 3][own][None]), [row])
        assert responses(alone) == [response]
        torch.testing.assert_close(
            alone.sampled_logprobs_BR[0], rollout.sampled_logprobs_BR[row, : len(response)], rtol=1e-4, atol=1e-4
        )


CUTS = replace(PLAIN, top_k=30, top_p=0.8, min_p=0.02)


@pytest.mark.parametrize(
    ("family", "how"), [("llama", PLAIN), ("llama", CUTS), ("gpt2", PLAIN), ("opt", PLAIN), ("gemma3_text", PLAIN)]
)
def test_one_seed_is_one_response_in_any_batch(family, how):
    model = tiny_causal_lm(family)
    how = replace(how, max_new_tokens=16)
    how = replace(how, end_token_id=frequent_token(roll(model, how)))
    if how.top_k:
        how = replace(how, bad_words=(tuple(responses(roll(model, how))[0][3:5]),))
    together = responses(roll(model, how))
    ids_BP, mask_BP = prompts()
    for row in range(len(ids_BP)):
        own = mask_BP[row]
        alone = roll(model, how, (ids_BP[row][own][None], mask_BP[row][own][None]), [row])
        assert responses(alone) == [together[row]]
    order = [5, 2, 7, 0]
    some = roll(model, how, (ids_BP[order], mask_BP[order]), order)
    assert responses(some) == [together[row] for row in order]
    wider = torch.nn.functional.pad(ids_BP, (6, 0), value=9), torch.nn.functional.pad(mask_BP, (6, 0))
    assert responses(roll(model, how, wider)) == together


def test_seeds_make_responses_differ():
    model = tiny_causal_lm("llama")
    ids_BP, mask_BP = prompts((4,))
    same_prompt = ids_BP.expand(6, -1), mask_BP.expand(6, -1)
    drawn = responses(roll(model, PLAIN, same_prompt))
    assert len({tuple(response) for response in drawn}) == 6
    assert responses(roll(model, PLAIN, same_prompt)) == drawn
    assert responses(roll(model, PLAIN, same_prompt, [0] * 6)) == [drawn[0]] * 6


@pytest.mark.parametrize("every", [None, 8])
def test_each_of_several_end_tokens_ends_a_response(every):
    """A response is that of a rollout without end tokens up to the first that is one, whichever comes first."""
    model = tiny_causal_lm("llama")
    free = responses(roll(model, PLAIN))
    first = frequent_token(roll(model, PLAIN))
    others = tuple(sorted({response[5] for response in free} - {first}))[:3]
    how = replace(PLAIN, end_token_id=first, ends=Ends(token_ids=others, check_tokens=every))
    rollout = roll(model, how)
    ends = {first, *others}
    cut = [next((place for place, token in enumerate(each) if token in ends), 11) for each in free]
    assert responses(rollout) == [each[: place + 1] for each, place in zip(free, cut, strict=True)]
    assert rollout.ended_B.tolist() == [bool(ends & set(each)) for each in free]
    assert len({each[-1] for each in responses(rollout)} & ends) > 1
    assert rollout.response_ids_BR.shape[1] == rollout.response_lengths_B.max()
    texts = rollout.texts(lambda ids: spelt(ids.tolist()), how.end_token_ids)
    assert not any(set(map(ord, text)) & {ord(spelt([end])) for end in ends} for text in texts)


def test_the_end_token_may_be_the_pad_token():
    model = tiny_causal_lm("llama")
    end = frequent_token(roll(model, PLAIN))
    apart = roll(model, replace(PLAIN, end_token_id=end))
    same = roll(model, replace(PLAIN, end_token_id=end, pad_token_id=end))
    assert responses(same) == responses(apart)
    assert torch.equal(same.response_mask_BR, apart.response_mask_BR)
    assert torch.equal(same.ended_B, apart.ended_B)


def test_every_row_ends_at_once():
    """A model that says one token only: the first is the last, and R is 1."""
    model = tiny_causal_lm("llama")
    ids_BP, mask_BP = prompts((3, 2))
    first = roll(model, replace(GREEDY, max_new_tokens=1), (ids_BP[:1], mask_BP[:1])).response_ids_BR.item()
    rollout = roll(model, replace(GREEDY, end_token_id=first), (ids_BP[:1], mask_BP[:1]))
    assert responses(rollout) == [[first]] and rollout.ended_B.tolist() == [True]
    cut = roll(model, replace(PLAIN, max_new_tokens=1), (ids_BP, mask_BP))
    assert cut.response_lengths_B.tolist() == [1, 1] and cut.ended_B.tolist() == [False, False]


def test_a_models_own_generation_settings_change_nothing():
    """DeepSpeed-Chat's rollouts were greedy, or whatever the checkpoint's generation_config said."""
    model = tiny_causal_lm("llama")
    how = replace(PLAIN, end_token_id=frequent_token(roll(model, PLAIN)))
    expected = responses(roll(model, how))
    own = model.generation_config
    own.do_sample, own.top_k, own.temperature, own.max_new_tokens = False, 1, 0.01, 2
    own.eos_token_id, own.repetition_penalty, own.min_new_tokens = expected[0][0], 5.0, 9
    assert responses(roll(model, how)) == expected


def test_shapes_and_dtypes():
    rollout = roll(tiny_causal_lm("llama", torch.bfloat16), PLAIN)
    assert rollout.response_ids_BR.dtype == rollout.response_lengths_B.dtype == torch.int64
    assert rollout.sampled_logprobs_BR.dtype == torch.float32 and rollout.ended_B.dtype == torch.bool
    assert rollout.response_ids_BR.shape == rollout.sampled_logprobs_BR.shape == (8, 12)
    assert not rollout.sampled_logprobs_BR.requires_grad and rollout.seconds > 0


def test_stop_strings_end_a_response_with_the_token_that_completes_them():
    model = tiny_causal_lm("llama")
    free = responses(roll(model, PLAIN))
    # Two texts of two tokens each, which two of the responses hold in their middle.
    stop = (spelt(free[2][4:6]), spelt(free[5][7:9]))
    rollout = roll(model, replace(PLAIN, ends=Ends(stop)), decode=spelt)
    stopped = 0
    for response, whole, ended in zip(responses(rollout), free, rollout.ended_B.tolist(), strict=True):
        ends = [spelt(whole).find(text) + 2 for text in stop if text in spelt(whole)]
        assert response == whole[: min(ends, default=12)]
        assert ended == bool(ends)
        stopped += ended
    assert 2 <= stopped < 8
    assert torch.equal(rollout.response_lengths_B[[2, 5]] <= torch.tensor([6, 9]), torch.tensor([True, True]))


def test_bad_words_are_never_said():
    """One token, and two tokens in a row; and what else is said has the log-probabilities of training."""
    model = tiny_causal_lm("llama")
    how = replace(PLAIN, temperature=0.7, max_new_tokens=20)
    free = responses(roll(model, how, samples=4))
    alone = frequent_token(roll(model, how))
    pairs = [tuple(response[at : at + 2]) for response in free for at in range(19)]
    pair = max((pair for pair in pairs if alone not in pair), key=pairs.count)
    rollout = roll(model, replace(how, bad_words=((alone,), pair)), samples=4)
    said = responses(rollout)
    assert not any(alone in response for response in said)
    assert not any(pair == tuple(response[at : at + 2]) for response in said for at in range(19))
    assert any(pair[1] in response for response in said)  # only after pair[0] is it kept back
    with torch.no_grad():
        logprobs_M = PolicyModel(model)(padded_rows(rollout.sequences(), PAD), Readout(0.7)).logprobs_M
    torch.testing.assert_close(rollout.sampled_logprobs_BR[rollout.response_mask_BR], logprobs_M, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("how", [PLAIN, GREEDY, replace(PLAIN, top_p=0.9, top_k=5)], ids=["sampled", "greedy", "cut"])
def test_numbers_that_are_none_end_in_one_sentence(how):
    """Rows 0 and 1 are as they should be; a prompt with token 50 computes NaN."""
    model = tiny_causal_lm("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
        model.get_output_embeddings().weight[50] = 0.0
    ids_BP = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 50, 10]])
    batch = (ids_BP, torch.ones_like(ids_BP).bool())
    with pytest.raises(ThreestepError, match="LlamaForCausalLM computed NaN at token 0 of response 2 .* of 3 re"):
        roll(model, how, batch)
    one = RolloutRequest.of_prompt(ids_BP[2], how, 0)
    with pytest.raises(ThreestepError, match="LlamaForCausalLM computed NaN"):
        list(TransformersRollout().stream(model, one, ()))


def streamed(model, prompt_ids_P, how, seed, more_end_tokens=()):
    return list(TransformersRollout().stream(model, RolloutRequest.of_prompt(prompt_ids_P, how, seed), more_end_tokens))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_draws_what_a_rollout_draws(family, temperature):
    """And stops at the model's own end tokens too."""
    model, how = tiny_causal_lm(family), replace(PLAIN, temperature=temperature, top_p=0.9, end_token_id=2)
    prompt_ids_P = torch.tensor([5, 9, 11, 30])
    for seed in range(4):
        rollout = roll(model, how, (prompt_ids_P[None], torch.ones(1, 4, dtype=torch.bool)), [seed])
        assert streamed(model, prompt_ids_P, how, seed) == rollout.response_of(0).tolist()
    whole = streamed(model, prompt_ids_P, PLAIN, 1)
    assert len(whole) == 12
    assert streamed(model, prompt_ids_P, PLAIN, 1, {whole[3]}) == whole[: whole.index(whole[3]) + 1]
