"""A trie gives what plain transformers makes of its sequences one by one, in float64: log-probabilities, entropies,
scores, values and gradients, each token that several sequences train with a weight of each."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.tries import forked_sequences, weights_of
from training.utils.contracts.documents import TokenSequence
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import trie_document
from training.utils.models.document_attention import use_document_attention
from training.utils.models.token_model import PolicyModel, Readout, ScalarModel

CPU, PAD = torch.device("cpu"), 0
# Of a norm. Scalars leave a model as float32, and the backward of a norm computes in it: steps of 6e-8.
EXACT, SCALARS, GRADIENTS = 1e-12, 3e-7, 2e-6
FORMS = ["sdpa", "by_document"]  # others: test_blocks.py, test_varlen_attention.py
FEW = range(6)
MANY = [range(first, first + 100) for first in range(0, 1000, 100)]


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([part.grad.flatten() for part in model.parameters() if part.grad is not None])


def targets_of(sequences: list[TokenSequence], values_NT: torch.Tensor) -> torch.Tensor:
    """Of each sequence, one after the other, what `values_NT` has where a target is predicted."""
    columns = [torch.nonzero(each.is_target).flatten() - 1 for each in sequences]
    return torch.cat([values_NT[row, columns[row]] for row in range(len(sequences))])


def plain_states(trunk: torch.nn.Module, sequences: list[TokenSequence]) -> torch.Tensor:
    """A plain forward, one sequence a row; causal attention hides what fills the rows behind them."""
    ids_NT = torch.nn.utils.rnn.pad_sequence([each.input_ids for each in sequences], batch_first=True)
    return trunk(input_ids=ids_NT, use_cache=False)[0]


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    assert got.shape == want.shape, what
    assert float((got - want).detach().norm()) <= tolerance * max(1.0, float(want.detach().norm())), what


def check_policy(model: torch.nn.Module, seed: int, weights: torch.Tensor, sequences: list[TokenSequence]) -> None:
    logits_NTV = model.lm_head(plain_states(model.model, sequences))
    logprobs_NTV = torch.log_softmax(logits_NTV / 0.8, dim=-1)
    after_NT = torch.nn.utils.rnn.pad_sequence([each.input_ids.roll(-1) for each in sequences], batch_first=True)
    want_M = targets_of(sequences, logprobs_NTV.gather(-1, after_NT.unsqueeze(-1)).squeeze(-1))
    entropies_M = targets_of(sequences, -(logprobs_NTV.exp() * logprobs_NTV).sum(-1))
    want = gradient(model, (want_M * weights).sum() + (entropies_M * weights.flip(0)).sum())
    read = PolicyModel(model)(packed_rows([[trie_document(sequences, 1)]], PAD), Readout(0.8, entropies=True))
    assert read.entropies_M is not None
    got = gradient(model, (read.logprobs_M * weights).sum() + (read.entropies_M * weights.flip(0)).sum())
    assert_close(read.logprobs_M, want_M, EXACT, f"trie {seed}")
    assert_close(read.entropies_M, entropies_M, EXACT, f"trie {seed}")
    assert_close(got, want, GRADIENTS, f"trie {seed}")


def check_scorer(model: torch.nn.Module, seed: int, weights: torch.Tensor, sequences: list[TokenSequence]) -> None:
    values_NT = model.score(plain_states(model.model, sequences)).squeeze(-1)
    ends_B = torch.stack([values_NT[row, len(each) - 1] for row, each in enumerate(sequences)])
    want_M = targets_of(sequences, values_NT)
    want = gradient(model, (want_M * weights).sum() + ends_B.square().sum())
    rows, scorer = packed_rows([[trie_document(sequences, 1)]], PAD), ScalarModel(model)
    got_M, got_B = scorer(rows, at="targets"), scorer(rows, at="end")
    got = gradient(model, (got_M * weights).sum() + got_B.double().square().sum())
    assert_close(got_M, want_M, SCALARS, f"trie {seed}")
    assert_close(got_B, ends_B, SCALARS, f"trie {seed}")
    assert_close(got, want, GRADIENTS, f"trie {seed}")


@pytest.mark.parametrize(
    "seeds",
    [FEW, *(pytest.param(hundred, marks=pytest.mark.long) for hundred in MANY)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
@pytest.mark.parametrize("form", FORMS)
def test_random_tries_are_their_sequences(form, seeds):
    models = tiny_causal_lm("llama", torch.float64), tiny_scalar_model("llama", torch.float64)
    for model in models:
        if form == "by_document":
            use_document_attention(model)
            assert model.config._attn_implementation == "sdpa_by_document"
        else:
            model.set_attn_implementation(form)
    most = 24 if seeds is FEW else 64
    for seed in seeds:
        sequences = forked_sequences(seed, most)
        weights = torch.cat(weights_of(sequences, seed))
        check_policy(models[0], seed, weights, sequences)
        check_scorer(models[1], seed, weights, sequences)
