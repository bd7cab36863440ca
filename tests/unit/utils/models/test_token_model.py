"""Log-probabilities and scores read at chosen positions equal what the plain models give."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tiny_models import FAMILIES, VOCABULARY, tiny_causal_lm, tiny_scalar_model
from training.utils.contracts.documents import TokenSequence, join
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel, Readout, ScalarModel, read_logits

PAD, EOS = 0, 2


def sequences(lengths=(17, 4, 11)) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [join(ids[:2], ids[2:]) for ids in drawn]


def test_read_logits_by_hand():
    # Logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8. At temperature 1/2 they are squared: 1, 4, 25 of 30.
    logits_MV = torch.log(torch.tensor([[1.0, 2.0, 5.0]])).expand(2, 3)
    targets_M = torch.tensor([1, 2])
    plain = read_logits(logits_MV, targets_M, Readout(entropies=True))
    torch.testing.assert_close(plain.logprobs_M, torch.log(torch.tensor([2 / 8, 5 / 8])))
    entropy = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    torch.testing.assert_close(plain.entropies_M, torch.tensor([entropy, entropy]))
    sharp = read_logits(logits_MV, targets_M, Readout(0.5))
    torch.testing.assert_close(sharp.logprobs_M, torch.log(torch.tensor([4 / 30, 25 / 30])))
    assert sharp.entropies_M is None
    # The sums of 1, 2, 5 and of 1, 4, 25; the last token has the largest logit.
    torch.testing.assert_close(plain.log_normalizers_M, torch.log(torch.tensor([8.0, 8.0])))
    torch.testing.assert_close(sharp.log_normalizers_M, torch.log(torch.tensor([30.0, 30.0])))
    assert plain.is_greedy_M.tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_read_logits_against_float64(temperature):
    generator = torch.Generator().manual_seed(0)
    logits_MV = torch.randn(50, 300, generator=generator) * 8
    targets_M = torch.randint(0, 300, (50,), generator=generator)
    got = read_logits(logits_MV, targets_M, Readout(temperature, entropies=True))
    exact_MV = torch.log_softmax(logits_MV.double() / temperature, -1)
    torch.testing.assert_close(
        got.logprobs_M.double(), exact_MV.gather(-1, targets_M[:, None])[:, 0], rtol=1e-5, atol=2e-5
    )
    torch.testing.assert_close(got.entropies_M.double(), -(exact_MV.exp() * exact_MV).sum(-1), rtol=1e-5, atol=5e-5)
    assert got.logprobs_M.dtype == torch.float32


def test_read_logits_computes_bfloat16_in_float32():
    logits_MV = (torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    targets_M = torch.tensor([0, 1, 2, 3])
    got = read_logits(logits_MV, targets_M, Readout(0.7, entropies=True))
    expected = read_logits(logits_MV.float(), targets_M, Readout(0.7, entropies=True))
    assert torch.equal(got.logprobs_M, expected.logprobs_M)
    assert torch.equal(got.entropies_M, expected.entropies_M)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_equals_the_models_own_logits(family, temperature):
    """Gemma 2 caps its logits after the head, which reading hidden states through the head alone would miss."""
    model = tiny_causal_lm(family, torch.float64)
    rows = padded_rows(sequences(), PAD)
    with torch.no_grad():
        got = PolicyModel(model)(rows, Readout(temperature, entropies=True, collisions=True))
        alone = PolicyModel(model)(rows, Readout(temperature, collisions=True))  # another way through the head
        logits_NTV = model(input_ids=rows.input_ids_NT, use_cache=False).logits
    exact_MV = torch.log_softmax(logits_NTV.flatten(0, 1)[rows.predictor_M] / temperature, -1)
    torch.testing.assert_close(
        got.logprobs_M.double(), exact_MV.gather(-1, rows.target_ids_M[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(got.entropies_M.double(), -(exact_MV.exp() * exact_MV).sum(-1), rtol=1e-6, atol=1e-5)
    for read in (got, alone):
        torch.testing.assert_close(read.collisions_M.double(), exact_MV.exp().square().sum(-1), rtol=1e-6, atol=1e-6)
    assert PolicyModel(model)(rows).collisions_M is None


@pytest.mark.parametrize("changed", [{"logit_scale": 0.25}, {"logits_scaling": 4.0}])
def test_families_that_scale_their_logits(changed):
    family = "cohere" if "logit_scale" in changed else "granite"
    shape = {name: value for name, value in FAMILIES["llama"].items() if name != "head_dim"}
    from tests.support import tiny_models

    config = tiny_models.AutoConfig.for_model(family, vocab_size=VOCABULARY, **shape, **changed)
    model = tiny_models.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    rows = padded_rows(sequences(), PAD)
    with torch.no_grad():
        got = PolicyModel(model)(rows).logprobs_M
        logits_NTV = model(input_ids=rows.input_ids_NT, use_cache=False).logits
    exact_MV = torch.log_softmax(logits_NTV.flatten(0, 1)[rows.predictor_M], -1)
    torch.testing.assert_close(
        got.double(), exact_MV.gather(-1, rows.target_ids_M[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )


def test_a_micro_batch_without_sequences_keeps_the_graph():
    model = tiny_causal_lm("llama")
    loss = PolicyModel(model)(padded_rows([], PAD)).logprobs_M.sum()
    assert loss.item() == 0.0
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.grad.any() for parameter in model.parameters())
    scorer = ScalarModel(tiny_scalar_model("llama"))
    assert scorer(padded_rows([], PAD)).shape == (0,)
    scorer(padded_rows([], PAD), at="targets").sum().backward()
    assert all(parameter.grad is not None for parameter in scorer.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_is_what_plain_transformers_gives(family):
    model = tiny_scalar_model(family)
    rows = padded_rows(sequences(), PAD, min_width=20)
    mask = (rows.segment_ids_NT >= 0).long()
    with torch.no_grad():
        ours_B = ScalarModel(model)(rows)
        plain_B = model(input_ids=rows.input_ids_NT, attention_mask=mask, use_cache=False).logits[:, 0]
        # One more pad token in front of nothing: the score is the last real token's, whatever follows it.
        alone_B = torch.cat([ScalarModel(model)(padded_rows([one], PAD)) for one in sequences()])
    assert ours_B.shape == (3,) and ours_B.dtype == torch.float32
    torch.testing.assert_close(ours_B, plain_B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_B, alone_B, rtol=1e-5, atol=1e-5)


def test_a_value_is_read_in_the_state_that_chooses_the_token():
    """The value of the first response token is read at the last prompt token, before the token is known."""
    scorer = ScalarModel(tiny_scalar_model("llama", torch.float64))
    one = join(torch.tensor([5, 6, 7]), torch.tensor([8, EOS]))
    with torch.no_grad():
        values_M = scorer(padded_rows([one], PAD), at="targets")
        for index, seen in enumerate((3, 4)):  # tokens that the state has seen
            prefix = TokenSequence(one.input_ids[:seen], torch.zeros(seen, dtype=torch.bool))
            assert values_M[index] == pytest.approx(scorer(padded_rows([prefix], PAD)).item(), abs=1e-6)
    assert values_M.shape == (2,)
