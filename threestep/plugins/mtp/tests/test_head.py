"""The head in packed rows against its definition in float64, and against rolled rows as other trainers have them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.layout.entries import mtp_entries, mtp_targets
from threestep.plugins.mtp.layout.masks import whole_row_mask
from threestep.plugins.mtp.reading import read_states
from threestep.plugins.mtp.rolled import rolled, rolled_logprob_sums
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, join, plain, shared_prompt
from training.utils.layout.rows import packed_rows
from training.utils.models.document_attention import use_document_attention
from training.utils.models.token_model import PolicyModel


def _ids(generator, count):
    return torch.randint(3, VOCABULARY, (count,), generator=generator)


def _by_definition(model, head, ids_T, targets, depths):
    """The sums of -log p of `targets` (places in the sequence) at each depth, by equations 21 to 24 of DeepSeek-V3:
    entry i joins h_i with the embedding of token i + k, and predicts token i + k + 1."""
    hidden_TH = model.base_model(input_ids=ids_T.unsqueeze(0))[0][0]
    embeddings_TH = model.get_input_embeddings()(ids_T)
    found = []
    for k, module in enumerate(head.depths[:depths], start=1):
        count = len(ids_T) - k  # entries 0 .. T-1-k
        joined = torch.cat([module.enorm(embeddings_TH[k:]), module.hnorm(hidden_TH[:count])], dim=-1)
        positions = torch.arange(k, len(ids_T)).unsqueeze(0)
        hidden_TH = module.trunk(
            inputs_embeds=module.eh_proj(joined).unsqueeze(0), position_ids=positions, use_cache=False
        )[0][0]
        logits = functional.linear(hidden_TH, model.get_output_embeddings().weight)
        logprobs = torch.log_softmax(logits, dim=-1)
        found.append(-sum((logprobs[t - k - 1, ids_T[t]] for t in targets if t >= k + 1), start=torch.zeros(())))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("by_document", [False, True])
def test_packed_rows_with_a_shared_prompt_give_the_definitions_loss_and_gradients(family, by_document):
    model = tiny_causal_lm(family, torch.float64)
    head = new_head(model, 2, seed=3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    generator = torch.Generator().manual_seed(1)
    prompt, responses = _ids(generator, 5), [_ids(generator, count) for count in (4, 1, 6)]
    text = _ids(generator, 7)
    expected = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for response in responses:
        ids = torch.cat([prompt, response])
        for depth, part in enumerate(_by_definition(model, head, ids, range(5, len(ids)), 2)):
            expected[depth] = expected[depth] + part
    for depth, part in enumerate(_by_definition(model, head, text, range(1, 7), 2)):
        expected[depth] = expected[depth] + part
    sum(expected).backward()
    wanted = {name: weight.grad.clone() for name, weight in head.named_parameters()}
    head.zero_grad()
    model.zero_grad()

    untrained = TokenSequence(prompt, torch.zeros(5, dtype=torch.bool))
    trained = [TokenSequence(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in responses]
    documents = [shared_prompt(untrained, trained), plain(join(text[:1], text[1:]))]
    if by_document:
        use_document_attention(model)
        for module in head.depths:
            use_document_attention(module.trunk)
    policy = PolicyModel(model)
    rows = packed_rows([documents, [documents[1]]], pad_token_id=0, with_before=True)
    entries = mtp_entries(rows, 2)
    read = policy(rows, after_trunk=read_states)
    hidden = head(read.beside.hidden_LH, read.beside.embeddings_LH, entries)
    got = []
    for depth, (hidden_MH, entry) in enumerate(zip(hidden, entries, strict=True), start=1):
        own = policy.target_head.read_alone(hidden_MH, entry.rows.target_ids_M)
        assert len(own.logprobs_M) == mtp_targets([*documents, documents[1]], depth)
        got.append(-own.logprobs_M[entry.rows.sequence_M < 4].sum())
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    sum(got).backward()
    # RMSNorm of these families computes in float32 whatever the model's precision (transformers 5.19).
    close = {"rtol": 1e-9, "atol": 1e-9} if family == "gpt2" else {"rtol": 2e-5, "atol": 2e-6}
    for name, weight in head.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], **close)
    assert all(weight.grad is None for weight in model.parameters())  # detached


@pytest.mark.parametrize(("family", "said"), [("gemma2", "not one linear layer"), ("opt", "embeddings have width 16")])
def test_a_family_that_cannot_share_is_refused(family, said):
    with pytest.raises(ThreestepError, match=f"--mtp_num_layers needs .*{said}"):
        new_head(tiny_causal_lm(family), 1, seed=1)


def test_the_generators_stay_as_they_are():
    model = tiny_causal_lm("llama")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, other = new_head(model, 1, seed=3), new_head(model, 1, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


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
