"""Packed rows and shared prompts give what separate sequences give: log-probabilities, entropies, scores, values and
gradients. Separate sequences are rows of their own without a mask, which test_token_model.py holds against the plain
models.

Beside the tolerance, residuals are to look like rounding: of mean zero, and without a part along what they are of,
where a wrong weight or a target counted twice would lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel, Readout, ScalarModel

PAD = 0
FAMILIES = ["llama", "qwen3", "gpt2", "opt", "gemma3_text"]
# Log-probabilities leave a model as float32, whatever it computes in: relative steps of 6e-8.
READ = {torch.float64: {"rtol": 3e-7, "atol": 1e-7}, torch.float32: {"rtol": 2e-5, "atol": 2e-5}}
# Of a gradient: the residual's size as a share of the gradient's, and its part along it.
GRADIENT = {torch.float64: (2e-7, 2e-8), torch.float32: (5e-6, 1e-6)}
TYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def documents() -> list[Document]:
    """Sequences of several lengths, prompts with two and with four responses, and one whose prompt is predicted too."""
    generator = torch.Generator().manual_seed(3)

    def run(length: int, first_target: int) -> TokenSequence:
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        return TokenSequence(ids, torch.arange(length) >= first_target)

    return [
        plain(run(13, 4)),
        shared_prompt(run(9, 99), [run(5, 0), run(8, 0)]),
        plain(run(2, 1)),
        shared_prompt(run(6, 99), [run(3, 0), run(1, 0), run(7, 0), run(4, 0)]),
        plain(run(17, 99)),  # nothing in it is to be predicted
        shared_prompt(run(4, 1), [run(2, 0), run(6, 3)]),
    ]


# Every document in one row; rows of two or three beside padding; the planner's own choice.
PACKINGS = {
    "one row": [[0, 1, 2, 3, 4, 5]],
    "three rows": [[3, 0], [5, 1, 2], [4]],
    "each its row": [[i] for i in range(6)],
}
_PLAN = PlanSettings(1, packed=True, max_row_tokens=40)
PACKINGS["planned"] = [list(row) for row in plan_step([item.tokens for item in documents()], _PLAN)[0][0]]
LAYOUTS = pytest.mark.parametrize("packing", PACKINGS.values(), ids=[name.replace(" ", "_") for name in PACKINGS])


def laid_out(packing: list[list[int]]) -> tuple[TokenRows, list[TokenRows]]:
    """(the documents in rows, the same sequences each in a row of its own)."""
    made = documents()
    alone = [packed_rows([[item]], PAD) for row in packing for index in row for item in unshared(made[index])]
    return packed_rows([[made[index] for index in row] for row in packing], PAD), alone


def model_of(family: str, dtype: torch.dtype, make: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    # Gemma's window is no shorter than the sequences; a shorter one falls back to padding (layout_check).
    return make(family, dtype, **({"sliding_window": 17} if family == "gemma3_text" else {}))


def gradients(module: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """All gradients as one float64 vector."""
    module.zero_grad()
    loss.backward()
    return torch.cat([part.grad.double().flatten() for part in module.parameters() if part.grad is not None])


def assert_rounding(got: torch.Tensor, want: torch.Tensor, tolerance: float, along: float) -> None:
    residual = got - want
    assert float(want.norm()) > 1e-3
    assert float(residual.norm() / want.norm()) < tolerance
    assert abs(float(residual @ want / (want @ want))) < along
    if float(residual.std()) > 0:  # the mean of n independent residuals of spread s strays by s / sqrt(n)
        assert abs(float(residual.mean() / residual.std())) * math.sqrt(residual.numel()) < 6.0


@LAYOUTS
@TYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_reads_packed_rows_as_separate_sequences(family, dtype, packing):
    policy = PolicyModel(model_of(family, dtype, tiny_causal_lm))
    packed, alone = laid_out(packing)
    got = policy(packed, Readout(0.8, entropies=True))
    parts = [policy(rows, Readout(0.8, entropies=True)) for rows in alone]
    logprobs_M = torch.cat([part.logprobs_M for part in parts])
    torch.testing.assert_close(got.logprobs_M, logprobs_M, **READ[dtype])
    torch.testing.assert_close(got.entropies_M, torch.cat([part.entropies_M for part in parts]), **READ[dtype])
    # Weights that differ a target: a gradient that went to the wrong one would show.
    weights_M = torch.randn(logprobs_M.numel(), generator=torch.Generator().manual_seed(0))
    want = gradients(policy, (logprobs_M * weights_M).sum())
    got_gradients = gradients(policy, (policy(packed, Readout(0.8)).logprobs_M * weights_M).sum())
    assert_rounding(got_gradients, want, *GRADIENT[dtype])


@LAYOUTS
@TYPES
@pytest.mark.parametrize("at", ["end", "targets"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_values_of_packed_rows_are_those_of_separate_sequences(family, at, dtype, packing):
    scorer = ScalarModel(model_of(family, dtype, tiny_scalar_model))
    packed, alone = laid_out(packing)
    want_B = torch.cat([scorer(rows, at=at) for rows in alone])
    torch.testing.assert_close(scorer(packed, at=at), want_B, **READ[dtype])
    weights_B = torch.randn(want_B.numel(), generator=torch.Generator().manual_seed(0))
    want = gradients(scorer, (want_B * weights_B).sum())
    got = gradients(scorer, (scorer(packed, at=at) * weights_B).sum())
    assert_rounding(got, want, *GRADIENT[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_documents_neighbours_change_no_bit_of_it(family):
    """Not a leak of any size: what stands before it in the row may be anything of its length."""
    policy = PolicyModel(model_of(family, torch.float32, tiny_causal_lm))
    first, *rest = documents()
    ids = first.segments[0].tokens.input_ids
    other = plain(TokenSequence((ids + 7) % VOCABULARY, first.segments[0].tokens.is_target))
    with torch.no_grad():
        mine = policy(packed_rows([[first, *rest]], PAD)).logprobs_M
        theirs = policy(packed_rows([[other, *rest]], PAD)).logprobs_M
    own = int(first.segments[0].tokens.is_target.sum())
    assert torch.equal(mine[own:], theirs[own:])
    assert not torch.equal(mine[:own], theirs[:own])


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_shared_prompt_wider_than_the_models_positions(family):
    """Positions are the sequences', not the row's: 6 + 8 x 10 tokens for a model of 20 positions, padding beside it."""
    changed = {"n_positions": 20} if family == "gpt2" else {"max_position_embeddings": 20}
    policy = PolicyModel(tiny_causal_lm(family, torch.float64, **changed))
    generator = torch.Generator().manual_seed(1)

    def run(length: int, is_target: bool) -> TokenSequence:
        return TokenSequence(
            torch.randint(1, VOCABULARY, (length,), generator=generator), torch.tensor([is_target] * length)
        )

    wide = shared_prompt(run(6, False), [run(10, True) for _ in range(8)])
    short = shared_prompt(run(3, False), [run(2, True)])
    with torch.no_grad():
        got = policy(packed_rows([[wide], [short]], PAD)).logprobs_M
        want = torch.cat(
            [policy(packed_rows([[item]], PAD)).logprobs_M for item in (*unshared(wide), *unshared(short))]
        )
    torch.testing.assert_close(got, want, **READ[torch.float64])
