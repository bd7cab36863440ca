"""The layout in the form of each attention implementation gives what the dense mask gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.kernels.kernels import cumulative_lengths
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models.attention import KERNELS, kernel_of
from training.utils.models.layout_check import why_not_packed
from training.utils.models.own_forward import read_own_forward
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel

CPU = torch.device("cpu")
# The families whose attention takes FlashAttention's arguments and whose positions are explicit.
FAMILIES = ["llama", "qwen3", "gpt2", "opt"]


def sequence(length: int, generator: torch.Generator, is_target: bool = True) -> TokenSequence:
    ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
    wanted = torch.full((length,), is_target)
    return TokenSequence(ids, wanted)


def plain_documents() -> list[list[Document]]:
    """Two rows of packed documents, the second with padding."""
    generator = torch.Generator().manual_seed(0)

    def document(length: int) -> Document:
        tokens = sequence(length, generator)
        tokens.is_target[0] = False
        return plain(tokens)

    return [[document(5), document(9)], [document(4), document(3), document(2)]]


def shared_documents() -> list[list[Document]]:
    generator = torch.Generator().manual_seed(1)

    def document(prompt: int, *responses: int) -> Document:
        return shared_prompt(sequence(prompt, generator, False), [sequence(length, generator) for length in responses])

    return [[document(4, 3, 5), document(2, 1, 2)], [document(3, 2, 2, 2)]]


def logprobs(model: Any, rows: TokenRows) -> torch.Tensor:
    with torch.no_grad():
        return PolicyModel(model)(rows).logprobs_M


def by_hand(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """What FlashAttention computes from cumulative lengths, document by document (query: [1, heads, tokens, width])."""
    assert attention_mask is None and query.shape[0] == 1
    bounds = given["cu_seq_lens_q"].tolist()
    assert torch.equal(given["cu_seq_lens_q"], given["cu_seq_lens_k"])
    longest = max(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
    assert given["max_length_q"] == given["max_length_k"] == longest
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(heads[:, :, begin:end] for heads in (query, key, value)),
            is_causal=True,
            scale=given.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


@pytest.fixture
def flash_by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an implementation that takes FlashAttention's arguments and runs on a CPU."""
    name = "varlen_by_hand"
    AttentionInterface.register(name, by_hand)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    monkeypatch.setitem(KERNELS, name, KERNELS["flash_attention_2"])
    yield name
    kernel_of.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_cumulative_lengths_give_what_the_dense_mask_gives(family, flash_by_hand):
    rows = packed_rows(plain_documents(), 0)
    model = tiny_causal_lm(family)
    dense = logprobs(model, rows)
    model.set_attn_implementation(flash_by_hand)
    torch.testing.assert_close(logprobs(model, rows), dense, rtol=1e-5, atol=1e-5)


def test_cumulative_lengths_of_one_document_a_row(flash_by_hand):
    rows = packed_rows([[row[0]] for row in plain_documents()], 0)
    assert rows.segments is None
    model = tiny_causal_lm("llama")
    dense = logprobs(model, rows)
    model.set_attn_implementation(flash_by_hand)
    torch.testing.assert_close(logprobs(model, rows), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])  # transformers gives GPT-2 no FlexAttention
@pytest.mark.parametrize("documents", [plain_documents, shared_documents])
def test_the_block_mask_gives_what_the_dense_mask_gives(family, documents):
    rows = packed_rows(documents(), 0)
    model = tiny_causal_lm(family)
    dense = logprobs(model, rows)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # compiling the kernel takes ten seconds and changes nothing here
        torch.testing.assert_close(logprobs(model, rows), dense, rtol=1e-5, atol=1e-5)


def test_the_block_mask_of_one_document_a_row():
    rows = packed_rows([[row[0]] for row in plain_documents()], 0)
    model = tiny_causal_lm("llama")
    dense = logprobs(model, rows)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(logprobs(model, rows), dense, rtol=1e-5, atol=1e-5)


def test_what_the_start_up_check_says(flash_by_hand):
    model = tiny_causal_lm("llama")
    read_own_forward(model)  # by sdpa: the stand-in needs lengths, and a plain forward gives none
    model.set_attn_implementation(flash_by_hand)

    def read(rows: TokenRows) -> torch.Tensor:
        return logprobs(model, rows)

    assert why_not_packed(model, read, 30, CPU, sharing=False) is None
    assert why_not_packed(model, read, 30, CPU, sharing=True) == (
        f"its attention implementation '{flash_by_hand}' cannot share a prompt; sdpa can"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2"])
def test_an_implementation_of_cuda_alone(name, tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    with pytest.raises(ThreestepError, match=f"--attn_implementation {name} needs a CUDA device.*; use sdpa"):
        load_causal_lm(ModelSettings(str(tmp_path), attn_implementation=name), torch.float32, 0)


def run(ids: list[int], targets: list[int] = ()) -> TokenSequence:
    is_target = torch.zeros(len(ids), dtype=torch.bool)
    is_target[list(targets)] = True
    return TokenSequence(torch.tensor(ids, dtype=torch.int64), is_target)


def test_cumulative_lengths_by_hand():
    """Row 0: documents of 3 and 2 tokens. Row 1: one of 4, then 1 of padding, which counts as a document."""
    rows = packed_rows([[plain(run([5, 6, 7])), plain(run([8, 9]))], [plain(run([1, 2, 3, 4]))]], pad_token_id=0)
    lengths, longest = cumulative_lengths(rows)
    assert lengths.tolist() == [0, 3, 5, 9, 10] and lengths.dtype == torch.int32
    assert longest == 4


def test_cumulative_lengths_cannot_share_a_prompt():
    rows = packed_rows([[shared_prompt(run([5, 6]), [run([7]), run([9])])]], pad_token_id=0)
    with pytest.raises(ThreestepError, match="use the attention implementation sdpa or flex_attention"):
        cumulative_lengths(rows)
