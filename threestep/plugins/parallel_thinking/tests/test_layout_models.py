"""Parallel thinking gives what each path gives by itself, and behind a block what a mask made by hand gives:
log-probabilities and gradients, on plain transformers models.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.parallel_thinking.layout import parallel_document, shared_prompt_in_parallel
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS, Path, Text, texts
from training.utils.contracts.documents import Document, TokenSequence, plain, unshared
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel, ScalarModel

FAMILIES = ["llama", "gpt2", "opt", "qwen3"]
PAD = 0
READ = {torch.float64: {"rtol": 3e-7, "atol": 1e-7}, torch.float32: {"rtol": 2e-5, "atol": 2e-5}}
TYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def two_blocks(second_path: int = 30) -> Text:
    """Two blocks with text around them, paths of several lengths, text between paths."""
    text = Text().trunk(10, 11, 12)
    text.block(Path([20, 21, 22], [23]), Path([second_path, 31]), Path([40, 41, 42, 43, 44]), opening=[13])
    return text.trunk(50, 51).block(Path([24]), Path([32, 33, 34], [35, 36])).trunk(52, 53, 54)


def by_hand(model: torch.nn.Module, text: Text) -> torch.Tensor:
    """Log-probabilities of every token but the first: the plain model under the dense mask of the rule."""
    logits_TV = model(
        input_ids=torch.tensor([text.ids]),
        position_ids=torch.tensor([text.positions]),
        attention_mask=text.mask()[None, None],
        use_cache=False,
    ).logits[0]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    return logprobs_TV[text.predecessors[1:], text.ids[1:]]


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([part.grad.double().flatten() for part in model.parameters() if part.grad is not None])


def assert_same_gradient(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert float(want.norm()) > 1e-3
    assert float((got - want).norm() / want.norm()) < (2e-7 if dtype == torch.float64 else 5e-6)


@TYPES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "packed"])
def test_the_layout_is_the_dense_mask_of_the_rule(family, dtype, beside):
    model, text = tiny_causal_lm(family, dtype), two_blocks()
    policy, document = PolicyModel(model), parallel_document(text.sequence(), TAGS)
    neighbour = plain(TokenSequence(torch.arange(10, 19), torch.zeros(9, dtype=torch.bool)))
    rows = packed_rows([[neighbour, document]] if beside else [[document]], PAD)
    weights_M = torch.randn(len(text.ids) - 1, generator=torch.Generator().manual_seed(0))
    got, want = policy(rows).logprobs_M, by_hand(model, text)
    torch.testing.assert_close(got, want, **READ[dtype])
    assert_same_gradient(gradient(model, (got * weights_M).sum()), gradient(model, (want * weights_M).sum()), dtype)


@TYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_path_is_what_it_is_alone(family, dtype):
    """The trunk with one path behind it is a plain sequence, positions 0, 1, 2, ...: no mask, no other path."""
    policy = PolicyModel(tiny_causal_lm(family, dtype))
    text = Text().trunk(10, 11, 12).block(Path([20, 21, 22]), Path([30, 31], [37]), Path([40]), opening=[13])
    ids = torch.tensor(text.ids)
    trunk = [column for column, place in enumerate(text.places) if place is None][:-1]  # without </Parallel>
    losses = {"parallel": torch.zeros(()), "alone": torch.zeros(())}
    for path in range(3):
        own = [column for column, place in enumerate(text.places) if place == (0, path)]
        alone = TokenSequence(ids[trunk + own], torch.arange(len(trunk) + len(own)) >= len(trunk))
        are_targets = torch.zeros(len(ids), dtype=torch.bool)
        are_targets[own] = True
        document = parallel_document(TokenSequence(ids, are_targets), TAGS)
        got = policy(packed_rows([[document]], PAD)).logprobs_M
        want = policy(packed_rows([[plain(alone)]], PAD)).logprobs_M
        torch.testing.assert_close(got, want, **READ[dtype])
        losses["parallel"] = losses["parallel"] + got.sum() * (path + 1)
        losses["alone"] = losses["alone"] + want.sum() * (path + 1)
    gradients = {name: gradient(policy, loss) for name, loss in losses.items()}
    assert_same_gradient(gradients["parallel"], gradients["alone"], dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_paths_change_what_follows_the_block_and_no_other_path(family):
    policy, text = PolicyModel(tiny_causal_lm(family)), two_blocks()
    with torch.no_grad():
        one, other = (
            policy(packed_rows([[parallel_document(given.sequence(), TAGS)]], PAD)).logprobs_M
            for given in (text, two_blocks(second_path=60))
        )
    changed = text.ids.index(30)
    sees_it = text.mask()[torch.tensor(text.predecessors[1:]), changed]  # the token that predicts each target
    sees_it[changed - 1] = True  # its own target is another
    assert torch.equal(one != other, sees_it)  # to the bit
    # </Parallel> is predicted from the third path, which does not see the second; all that follows it does
    closes = text.ids.index(TAGS.close_block)
    assert not sees_it[closes - 1] and bool(sees_it[closes:].all())


@settings(max_examples=15, deadline=None)
@given(text=texts())
def test_any_text_is_read_as_by_hand(text):
    model = tiny_causal_lm("llama", torch.float64)
    if len(text.ids) == 1:
        return
    with torch.no_grad():
        got = PolicyModel(model)(packed_rows([[parallel_document(text.sequence(), TAGS)]], PAD)).logprobs_M
        torch.testing.assert_close(got, by_hand(model, text), **READ[torch.float64])


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_with_blocks_score_as_behind_their_own_prompt(family):
    """Reward models: the prompt once for all responses, or a row a response."""
    scorer = ScalarModel(tiny_scalar_model(family, torch.float64))
    prompt = TokenSequence(torch.tensor([7, 8, 9]), torch.zeros(3, dtype=torch.bool))
    texts_ = [two_blocks(), Text().trunk(10).block(Path([11]), Path([12, 13])).trunk(14), Text().trunk(15, 16)]
    responses = [TokenSequence(torch.tensor(text.ids), torch.zeros(len(text.ids), dtype=torch.bool)) for text in texts_]
    document: Document = shared_prompt_in_parallel(prompt, responses, TAGS)
    with torch.no_grad():
        shared_B = scorer(packed_rows([[document]], PAD))
        rows_B = scorer(packed_rows([[alone] for alone in unshared(document)], PAD))
        by_hand_B = []
        for text in texts_:
            width = 3 + len(text.ids)
            mask = torch.ones(width, width, dtype=torch.bool).tril()
            mask[3:, 3:] = text.mask()
            hidden = scorer.model.base_model(
                input_ids=torch.tensor([[7, 8, 9, *text.ids]]),
                position_ids=torch.tensor([[0, 1, 2, *(3 + position for position in text.positions)]]),
                attention_mask=mask[None, None],
                use_cache=False,
            )[0]
            by_hand_B.append(scorer.model.score(hidden[0, -1]).squeeze(-1).to(shared_B.dtype))
    torch.testing.assert_close(shared_B, rows_B, **READ[torch.float64])
    torch.testing.assert_close(shared_B, torch.stack(by_hand_B), **READ[torch.float64])
    assert VOCABULARY > max(max(text.ids) for text in texts_)
