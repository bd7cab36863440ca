"""Which attention a model is given, why, and what comes where it is wrong. On a CPU: the kernel for CUDA is a
reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.support.varlen_reference import varlen_attn
from threestep.plugins.kernels import varlen
from threestep.plugins.kernels.kernels import VarlenKernel, cumulative_lengths
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models import attention_choice, layout_check
from training.utils.models.attention import KERNELS, kernel_of
from training.utils.models.attention_choice import choose_on_cuda, planned_attention, settle_attention
from training.utils.models.layout_check import notes_on, why_not_packed
from training.utils.models.own_forward import own_forward_of, read_again, read_own_forward
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel

CPU = torch.device("cpu")
HALF = torch.bfloat16
NONE = "does not support dropout, but the model's attention uses"


@pytest.fixture(autouse=True)
def a_kernel_and_own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for table in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(table, "_global_mapping", dict(table._global_mapping))
    monkeypatch.setattr(varlen, "torch_kernel", lambda: varlen_attn)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(layout_check, "_gradient", lambda *given: None)  # FlexAttention has no backward on a CPU
    with torch.compiler.set_stance("force_eager"):
        yield


def chosen(model: PreTrainedModel, dropout: float | None = None) -> tuple[str, list[str], list[str]]:
    own = own_forward_of(model)
    choose_on_cuda(model, own, dropout)
    return model.config._attn_implementation, own.notes, own.others


def why_not(model: PreTrainedModel, kernel: Any = None) -> str | None:
    policy = PolicyModel(model)

    def read(rows: TokenRows) -> torch.Tensor:
        return policy(rows).logprobs_M

    return why_not_packed(model, read, 30, CPU)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_varlen_is_the_first_choice_and_packs(family):
    model = tiny_causal_lm(family, HALF)
    size = model.config.hidden_size // model.config.num_attention_heads
    name, notes, others = chosen(model)
    assert (name, notes) == (
        "varlen", ["attention is varlen: torch's kernel for sequences of different lengths, without a mask"]
    )  # fmt: skip
    assert others == (["flex_attention", "sdpa"] if getattr(model.config, "head_dim", size) >= 16 else ["sdpa"])
    assert why_not(model) is None and model.config._attn_implementation == "varlen"
    assert len(own_forward_of(model).notes) == 1
    assert chosen(tiny_causal_lm("llama", HALF, attention_dropout=0.25), 0.0)[0] == "varlen"  # the run sets it to 0


def test_other_families_and_machines(monkeypatch):
    said = ("eager", ["attention is 'eager': transformers offers this family no other"])
    assert chosen(tiny_causal_lm("bloom", HALF))[:2] == said
    model = tiny_causal_lm("llama", HALF, head_dim=16)
    model._supports_attention_backend = False
    name, notes, _ = chosen(model)
    assert name == "flex_attention"
    assert notes[0] == "attention is not varlen: the family passes no keyword arguments to attention"
    with monkeypatch.context() as patch:
        patch.setattr(attention_choice, "current_difference", lambda *given, **more: float("nan"))
        name, notes, _ = chosen(tiny_causal_lm("llama", HALF, head_dim=16))
    assert name == "flex_attention"
    assert notes[0] == "attention is not varlen: the switch changes the model's outputs"
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    name, notes, others = chosen(tiny_causal_lm("llama"))
    assert (name, others) == ("sdpa", [])
    assert notes[1] == "attention is not flex_attention: Triton, which compiles it, is not available here"


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "dropout", "name", "reason", "flex"),
    [
        ("llama", torch.float32, {}, None, "flex_attention",
         "its kernel needs bf16 or fp16, but the model is in float32", None),
        ("llama", HALF, {"attention_dropout": 0.25}, None, "sdpa",
         f"its kernel {NONE} 0.25", f"it {NONE} 0.25"),
        ("llama", HALF, {}, 0.5, "sdpa",
         f"its kernel {NONE} 0.5", f"it {NONE} 0.5"),
        ("llama", HALF, {"head_dim": 264}, None, "flex_attention",
         "its kernel supports head sizes up to 256, but the model's is 264", None),
        ("gemma2", HALF, {"sliding_window": 64}, None, "sdpa",
         "its kernel does not support softcap, which the family uses",
         "it would apply the family's softcap, which sdpa ignores"),
    ],
)  # fmt: skip
def test_what_varlen_cannot_is_the_second_choice(family, dtype, changes, dropout, name, reason, flex):
    model = tiny_causal_lm(family, dtype, **({"head_dim": 16} | changes))
    found, notes, others = chosen(model, dropout)
    assert found == name and notes[0] == f"attention is not varlen: {reason}"
    if name == "sdpa":
        last = "attention is sdpa: with a dense mask where rows hold several documents"
        assert others == [] and notes[1:] == [f"attention is not flex_attention: {flex}", last]
    else:
        assert others == ["sdpa"] and notes[1:] == ["attention is flex_attention: compiled, with masked blocks skipped"]
        assert why_not(model) is None and own_forward_of(model).others == ["sdpa"]


def test_a_kernel_that_is_wrong_is_found_and_the_next_one_taken(monkeypatch):
    """A causal mask aligned at the top left: of a shared prompt, a response sees too little."""

    def top_left(
        query: Any, key: Any, value: Any, *given: Any, enable_gqa: bool = False, **others: Any
    ) -> torch.Tensor:
        begins, key_begins, *longest = given
        lasts = [index + length for index, length in zip(key_begins.tolist(), begins.diff().tolist(), strict=False)]
        kept = torch.cat([torch.arange(*bounds) for bounds in zip(key_begins.tolist(), lasts, strict=False)])
        return varlen_attn(query, key[kept], value[kept], begins, begins, *longest, enable_gqa=enable_gqa, **others)

    monkeypatch.setattr(varlen, "torch_kernel", lambda: top_left)
    monkeypatch.setattr(VarlenKernel, "why_not", lambda *given: None)  # float32: rounding hides nothing
    model = tiny_causal_lm("llama", head_dim=16)
    assert chosen(model)[0] == "varlen" and why_not(model) is None
    own = own_forward_of(model)
    assert model.config._attn_implementation == "flex_attention" and own.others == ["sdpa"]
    assert notes_on(model)[1].startswith(
        "attention is flex_attention (compiled, with masked blocks skipped) instead of varlen: a packed row and "
        "separate sequences differ by "
    )
    read_again(model)
    assert own_forward_of(model).others == ["sdpa"] and own_forward_of(model).notes == own.notes


def test_all_that_was_left_is_tried_before_rows_are_padded(monkeypatch):
    model = tiny_causal_lm("llama", HALF, head_dim=16)
    assert chosen(model)[0] == "varlen"
    policy = PolicyModel(model)

    def read(rows: TokenRows) -> torch.Tensor:
        if rows.segments is not None:
            raise RuntimeError(f"no {model.config._attn_implementation}")
        return policy(rows).logprobs_M

    reason = why_not_packed(model, read, 30, CPU)
    assert reason == "its forward rejects the mask of segments (RuntimeError: no sdpa)"
    tried = own_forward_of(model).notes[1:]
    assert [note.split(" (")[0] for note in tried] == ["attention is flex_attention", "attention is sdpa"]


def test_rollouts_of_the_second_choice_are_plain():
    model = tiny_causal_lm("llama", head_dim=16)
    prompt = {"input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), "attention_mask": torch.ones(2, 4).long()}
    prompt["attention_mask"][0, :2] = 0
    before = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert chosen(model)[0] == "flex_attention"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "threestep.plugins.kernels.flex.flex_attention_forward",
            lambda *_, **__: pytest.fail("flex"),
        )
        assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), before)


def test_varlen_by_name_is_refused_where_it_cannot_be():
    model = tiny_causal_lm("llama")
    with pytest.raises(ThreestepError, match="^--attn_implementation varlen: its kernel needs bf16 .*; use auto or"):
        settle_attention(model, own_forward_of(model), "varlen", None, compiled=False)
    model = tiny_causal_lm("llama", HALF)
    settle_attention(model, own_forward_of(model), "varlen", None, compiled=False)
    assert model.config._attn_implementation == "varlen"


@pytest.mark.parametrize(
    ("family", "dtype", "dropout", "planned"),
    [
        ("llama", HALF, None, "varlen"),
        ("llama", HALF, 0.1, "sdpa"),
        ("llama", torch.float32, None, "flex_attention"),
        ("gemma2", HALF, None, "sdpa"),
        ("bloom", HALF, None, "sdpa"),
    ],
)
def test_what_a_dry_run_plans(family, dtype, dropout, planned):
    changes = {} if family == "bloom" else {"head_dim": 16}
    model = tiny_causal_lm(family, dtype, **changes).to("meta")
    assert planned_attention(model, "auto", True, dropout) == planned
    assert planned_attention(model, "auto", False, dropout) == "sdpa"
    assert planned_attention(model, "flash_attention_2", True, dropout) == "flash_attention_2"


# The families whose attention takes FlashAttention's arguments and whose positions are explicit.
FAMILIES = ["llama", "qwen3", "gpt2", "opt"]


def plain_documents() -> list[list[Document]]:
    """Two rows of packed documents, the second with padding."""
    generator = torch.Generator().manual_seed(0)

    def document(length: int) -> Document:
        is_target = torch.arange(length) > 0
        return plain(TokenSequence(torch.randint(0, VOCABULARY, (length,), generator=generator), is_target))

    return [[document(5), document(9)], [document(4), document(3), document(2)]]


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


@pytest.mark.parametrize("documents_a_row", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_cumulative_lengths_give_what_the_dense_mask_gives(family, documents_a_row, flash_by_hand):
    rows = packed_rows([row[:documents_a_row] for row in plain_documents()], 0)
    assert (rows.segments is None) == (documents_a_row == 1)
    model = tiny_causal_lm(family)
    dense = logprobs(model, rows)
    model.set_attn_implementation(flash_by_hand)
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


def run(ids: list[int]) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool))


def test_cumulative_lengths_by_hand():
    """Row 0: documents of 3 and 2 tokens. Row 1: one of 4, then 1 of padding, which counts as a document."""
    rows = packed_rows([[plain(run([5, 6, 7])), plain(run([8, 9]))], [plain(run([1, 2, 3, 4]))]], pad_token_id=0)
    lengths, longest = cumulative_lengths(rows)
    assert lengths.tolist() == [0, 3, 5, 9, 10] and lengths.dtype == torch.int32
    assert longest == 4
    rows = packed_rows([[shared_prompt(run([5, 6]), [run([7]), run([9])])]], pad_token_id=0)
    with pytest.raises(ThreestepError, match="use --attn_implementation sdpa or flex_attention"):
        cumulative_lengths(rows)
