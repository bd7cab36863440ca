"""Rolled rows with `whole_row_mask` against entries without a shift: the same targets, losses and gradients."""

from __future__ import annotations

import doctest

import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.mtp import rolled as module
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.layout.context_slices import zigzag_slice
from threestep.plugins.mtp.layout.entries import mtp_entries
from threestep.plugins.mtp.layout.masks import whole_row_mask
from threestep.plugins.mtp.reading import read_states
from threestep.plugins.mtp.rolled import rolled, rolled_logprob_sums
from training.utils.contracts.documents import join, plain
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel


def _batch(generator):
    """(prompts, responses, masks) of one to four sequences."""

    def ids(most):
        count = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(3, VOCABULARY, (count,), generator=generator)

    count = int(torch.randint(1, 5, (1,), generator=generator))
    return [ids(4) for _ in range(count)], [ids(6) for _ in range(count)]


def _row(prompts, responses, pad):
    """(rows for the entries, the mask that other trainers get, lengths); `pad` more slots."""
    documents = [plain(join(prompt, response)) for prompt, response in zip(prompts, responses, strict=True)]
    lengths = [document.tokens for document in documents]
    width = sum(lengths) + pad
    rows = packed_rows([documents], 0, min_width=width, with_before=True)
    masks = [torch.ones(len(response), dtype=torch.int64) for response in responses]
    mask = whole_row_mask(masks, lengths, [len(response) for response in responses], width)
    return rows, mask, lengths


def test_the_worked_example():
    assert doctest.testmod(module).failed == 0


def test_both_paths_train_the_same_tokens_from_the_same_states():
    """By place: (slot of the state, slot of the embedding, slot of the target) of every target, in 1,000 batches."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        prompts, responses = _batch(generator)
        rows, mask, lengths = _row(prompts, responses, pad=2)
        places = torch.arange(rows.input_ids_NT.numel()).unsqueeze(0)
        before = rows.before_NT.flatten()
        for depth, entry in enumerate(mtp_entries(rows, 2), start=1):
            theirs = rolled(places, mask.bool(), lengths, depth)
            slots = torch.nonzero(theirs.mask_1T[0]).flatten()
            want = {(int(i), int(theirs.embedded_1T[0, i]), int(theirs.target_1T[0, i])) for i in slots}
            got = set()
            for embedded in entry.rows.predictor_M.tolist():
                state = embedded
                for _ in range(depth):
                    state = int(before[state])
                got.add((state, embedded, embedded + 1))
            assert got == want


def test_ranks_of_context_parallelism_share_the_mask_out():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        prompts, responses = _batch(generator)
        rows, mask, lengths = _row(prompts, responses, pad=0)
        trained = rolled(rows.input_ids_NT, mask.bool(), lengths, 1).mask_1T[0]
        parts = torch.split(trained, lengths)
        of_ranks = [
            sum(int(zigzag_slice(part.long(), rank, 2, pad_value=0).sum()) for part in parts) for rank in (0, 1)
        ]
        assert sum(of_ranks) == int(trained.sum())


@pytest.mark.parametrize(
    "batches", [pytest.param(8, id="a-few"), pytest.param(1000, id="a-thousand", marks=pytest.mark.long)]
)
def test_losses_and_gradients_are_the_same(batches):
    model = tiny_causal_lm("gpt2", torch.float64)  # LayerNorm in float64: nothing of it is computed in float32
    head, policy = new_head(model, 2, seed=1), PolicyModel(model)
    generator = torch.Generator().manual_seed(2)
    for _ in range(batches):
        rows, mask, lengths = _row(*_batch(generator), pad=1)
        head.zero_grad()
        read = policy(rows, after_trunk=read_states)
        entries = mtp_entries(rows, 2)
        ours = [
            policy.target_head.read_alone(hidden_MH, entry.rows.target_ids_M).logprobs_M
            for hidden_MH, entry in zip(head(*read.beside[:2], entries), entries, strict=True)
        ]
        sum(part.sum() for part in ours).backward()
        gradients = {name: weight.grad.clone() for name, weight in head.named_parameters() if weight.grad is not None}
        head.zero_grad()
        theirs = rolled_logprob_sums(
            head, model.get_input_embeddings(), model.get_output_embeddings(), read.beside.hidden_LH, rows=rows,
            mask_1T=mask.bool(), lengths=lengths,
        )  # fmt: skip
        assert [len(part) for part in ours] == [count for _, count in theirs]
        for part, (total, _) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(part.sum(), total, rtol=1e-10, atol=1e-10)
        sum(total for total, _ in theirs).backward()
        for name, weight in head.named_parameters():
            if name in gradients:
                torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-9, atol=1e-10)
