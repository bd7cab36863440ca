"""A trie gives what plain transformers makes of its sequences one by one, in float64: log-probabilities, entropies,
scores, values and gradients, each token that several sequences train with a weight of each."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.tries import forked_conversations, forked_sequences, weights_of
from training.step3_ppo.losses.losses import own_sequence_means
from training.utils.contracts.documents import TokenSequence
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import SequenceLayout, rank_share, trie_document
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


# How conversations that fork are laid out, in turns.
PLANS = {
    "shared": PlanSettings(1, 600, 8, True, 600, least_shared_tokens=1),
    "prompts": PlanSettings(1, 600, 8, True, 600),
    "padded": PlanSettings(1, 200, 6),
    "two ranks": PlanSettings(2, 120, 8, True, 60, least_shared_tokens=2),
}


def loss_of(weighed_M: torch.Tensor, logprobs_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """What a loss may do: weigh tokens, and multiply by a mean over the whole conversation."""
    return (weighed_M * own_sequence_means(logprobs_M, sequence_M)).sum()


def check_forks(policy: torch.nn.Module, scorer: torch.nn.Module, seed: int, most: int) -> None:
    """A conversation is one sequence to a loss, and its parts are rows that know nothing of each other."""
    conversations = forked_conversations(seed, most)
    sequences = [each.tokens for each in conversations]
    parts = [part for each in sequences for part in each.parts]
    weights = weights_of(sequences, seed)
    number_M = torch.arange(len(sequences)).repeat_interleave(torch.tensor([len(each) for each in weights]))
    logprobs_NTV = torch.log_softmax(policy.lm_head(plain_states(policy.model, parts)) / 0.8, dim=-1)
    after_NT = torch.nn.utils.rnn.pad_sequence([each.input_ids.roll(-1) for each in parts], batch_first=True)
    want_M = targets_of(parts, logprobs_NTV.gather(-1, after_NT.unsqueeze(-1)).squeeze(-1))
    wanted = loss_of(want_M * torch.cat(weights), want_M, number_M)
    want = gradient(policy, wanted)
    values_NT = scorer.score(plain_states(scorer.model, parts)).squeeze(-1)
    want_values_M = targets_of(parts, values_NT)
    lasts = torch.tensor([len(each.parts) for each in sequences]).cumsum(0) - 1
    want_ends = [values_NT[last, len(parts[last]) - 1] for last in lasts]
    want_values = gradient(scorer, (want_values_M * torch.cat(weights)).sum())
    plan, losses, own = list(PLANS.values())[seed % len(PLANS)], [], {}
    policy.zero_grad()
    scorer.zero_grad()
    for rank in range(plan.ranks):
        for indices, rows in rank_share(sequences, SequenceLayout(plan, PAD, rank), CPU):
            read = PolicyModel(policy)(rows, Readout(0.8))
            sizes = [len(weights[index]) for index in indices]
            weights_M = torch.cat([torch.empty(0, dtype=torch.float64), *(weights[index] for index in indices)])
            losses.append(loss_of(read.logprobs_M * weights_M, read.logprobs_M, rows.sequence_M))
            values_M, ends_B = ScalarModel(scorer)(rows, at="targets"), ScalarModel(scorer)(rows, at="end")
            losses[-1].backward()
            (values_M * weights_M).sum().backward()
            columns = (rows.target_ids_M, read.logprobs_M.detach(), values_M.detach())
            each = zip(*(column.split(sizes) for column in columns), ends_B.detach(), strict=True) if sizes else ()
            for index, found in zip(indices, each, strict=True):
                assert index not in own, "a conversation is trained once"
                own[index] = found
    # Each token that was drawn is a target once, in the order in which it was drawn.
    assert [own[index][0].tolist() for index in range(len(sequences))] == [each.drawn for each in conversations]
    assert_close(torch.cat([own[index][1] for index in range(len(own))]), want_M, EXACT, f"forks {seed}")
    assert_close(torch.stack(losses).sum(), wanted, EXACT, f"forks {seed}")
    assert_close(torch.cat([own[index][2] for index in range(len(own))]), want_values_M, SCALARS, f"forks {seed}")
    assert_close(torch.stack([own[index][3] for index in range(len(own))]), torch.stack(want_ends), SCALARS, f"{seed}")
    for model, wished in ((policy, want), (scorer, want_values)):
        got = torch.cat([part.grad.flatten() for part in model.parameters() if part.grad is not None])
        assert_close(got, wished, GRADIENTS, f"forks {seed}")


@pytest.mark.parametrize(
    "seeds",
    [range(8), *(pytest.param(each, marks=[pytest.mark.long, pytest.mark.timeout(1800)]) for each in MANY)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
@pytest.mark.parametrize("form", FORMS)
def test_conversations_that_fork_are_their_parts(form, seeds):
    models = tiny_causal_lm("llama", torch.float64), tiny_scalar_model("llama", torch.float64)
    for model in models:
        if form == "by_document":
            use_document_attention(model)
        else:
            model.set_attn_implementation(form)
    for seed in seeds:
        check_forks(*models, seed, 24 if len(seeds) < 100 else 64)
