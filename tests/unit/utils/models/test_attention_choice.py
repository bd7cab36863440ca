"""Which attention a model is given, why, and what comes where it is wrong. On a CPU: the kernel for CUDA is a
reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tests.support.tiny_models import tiny_causal_lm
from tests.support.varlen_reference import varlen_attn
from training.utils.base.errors import ThreestepError
from training.utils.contracts.token_rows import TokenRows
from training.utils.loading.models import load_causal_lm
from training.utils.models import attention_choice, layout_check
from training.utils.models.attention import varlen_attention
from training.utils.models.attention_choice import choose_on_cuda, planned_attention, settle_attention
from training.utils.models.layout_check import notes_on, why_not_packed
from training.utils.models.own_forward import OwnForward, own_forward_of, read_again
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel

CPU = torch.device("cpu")
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def a_kernel_and_own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for table in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(table, "_global_mapping", dict(table._global_mapping))
    monkeypatch.setattr(varlen_attention, "torch_kernel", lambda: varlen_attn)
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
    assert name == "varlen" and notes == [
        "attention is varlen: torch's kernel for runs of several lengths, without a mask"
    ]
    assert others == (["flex_attention", "sdpa"] if getattr(model.config, "head_dim", size) >= 16 else ["sdpa"])
    assert (
        why_not(model) is None
        and model.config._attn_implementation == "varlen"
        and len(own_forward_of(model).notes) == 1
    )


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "dropout", "reason"),
    [
        ("llama", torch.float32, {}, None, "its kernel computes in bf16 and fp16, and the model is in float32"),
        ("llama", HALF, {"attention_dropout": 0.25}, None,
         "its kernel has no dropout, and the model's attention has 0.25"),
        ("llama", HALF, {}, 0.5, "its kernel has no dropout, and the model's attention has 0.5"),
        ("llama", HALF, {"head_dim": 264}, None, "its kernel takes heads of 256 at most, and the model's have 264"),
        ("gemma2", HALF, {"sliding_window": 64}, None, "its kernel takes no softcap, which the family gives it"),
    ],
)  # fmt: skip
def test_what_varlen_cannot_is_the_second_choice(family, dtype, changes, dropout, reason):
    model = tiny_causal_lm(family, dtype, **({"head_dim": 16} | changes))
    name, notes, others = chosen(model, dropout)
    assert notes[0] == f"attention is not varlen: {reason}"
    if name == "sdpa":
        assert others == [] and notes[2:] == ["attention is sdpa: with a dense mask where rows hold several documents"]
    if "dropout" in reason:
        assert name == "sdpa"
        assert notes[1] == f"attention is not flex_attention: it has no dropout, and {reason.split(', and ')[1]}"
    elif "softcap" in reason:
        assert name == "sdpa"
        assert notes[1] == "attention is not flex_attention: with it softcap, which the family gives, would count"
    else:
        assert name == "flex_attention" and others == ["sdpa"]
        assert notes[1:] == ["attention is flex_attention: compiled, masked blocks are skipped"]
        assert why_not(model) is None and own_forward_of(model).others == ["sdpa"]


def test_dropout_that_the_run_sets_to_zero():
    assert chosen(tiny_causal_lm("llama", HALF, attention_dropout=0.25), 0.0)[0] == "varlen"


def test_a_family_that_keeps_its_arguments():
    model = tiny_causal_lm("llama", HALF, head_dim=16)
    model._supports_attention_backend = False
    name, notes, _ = chosen(model)
    assert name == "flex_attention"
    assert notes[0] == "attention is not varlen: the family hands no keyword arguments on to attention"


def test_a_family_without_sdpa():
    assert chosen(tiny_causal_lm("bloom", HALF))[:2] == (
        "eager",
        ["attention is 'eager': transformers gives the family no other"],
    )


def test_without_triton_sdpa_is_the_last(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    name, notes, others = chosen(tiny_causal_lm("llama"))
    assert (name, others) == ("sdpa", [])
    assert notes[1] == "attention is not flex_attention: Triton, which compiles it, cannot be used here"


def test_a_family_that_computes_something_else_under_the_name(monkeypatch):
    def other(*given: Any, **others: Any) -> OwnForward:
        return float("nan")

    monkeypatch.setattr(attention_choice, "current_difference", other)
    name, notes, _ = chosen(tiny_causal_lm("llama", HALF, head_dim=16))
    assert name == "flex_attention"
    assert notes[0] == "attention is not varlen: the family computes something else under another name"


def test_a_kernel_that_is_wrong_is_found_and_the_next_one_taken(monkeypatch):
    """A causal mask aligned at the top left: of a shared prompt, a response sees too little."""

    def top_left(
        query: Any, key: Any, value: Any, *given: Any, enable_gqa: bool = False, **others: Any
    ) -> torch.Tensor:
        begins, key_begins, *longest = given
        lasts = [index + length for index, length in zip(key_begins.tolist(), begins.diff().tolist(), strict=False)]
        kept = torch.cat([torch.arange(*bounds) for bounds in zip(key_begins.tolist(), lasts, strict=False)])
        return varlen_attn(query, key[kept], value[kept], begins, begins, *longest, enable_gqa=enable_gqa, **others)

    monkeypatch.setattr(varlen_attention, "torch_kernel", lambda: top_left)
    monkeypatch.setattr(
        attention_choice, "_why_not_varlen", lambda model, call: None
    )  # float32: rounding hides nothing
    model = tiny_causal_lm("llama", head_dim=16)
    assert chosen(model)[0] == "varlen" and why_not(model) is None
    own = own_forward_of(model)
    assert model.config._attn_implementation == "flex_attention" and own.others == ["sdpa"]
    assert notes_on(model)[1].startswith(
        "attention is flex_attention, compiled, masked blocks are skipped, and not varlen: a packed row and separate "
        "sequences differ by "
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
    assert reason == "its forward refuses the mask of segments (RuntimeError: no sdpa)"
    tried = own_forward_of(model).notes[1:]
    assert [note.split(",")[0] for note in tried] == ["attention is flex_attention", "attention is sdpa"]


def test_rollouts_of_the_second_choice_are_plain():
    model = tiny_causal_lm("llama", head_dim=16)
    prompt = {"input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), "attention_mask": torch.ones(2, 4).long()}
    prompt["attention_mask"][0, :2] = 0
    before = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert chosen(model)[0] == "flex_attention"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "training.utils.models.attention.flex_attention.flex_attention_forward",
            lambda *_, **__: pytest.fail("flex"),
        )
        assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), before)


def test_varlen_by_name_is_refused_where_it_cannot_be():
    model = tiny_causal_lm("llama")
    with pytest.raises(ThreestepError, match="^--attn_implementation varlen: its kernel computes in bf16 .*; use"):
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("wanted", ["auto", "sdpa"])
def test_on_a_cpu_it_is_runs_in_turn(save_folder, wanted):
    model = load_causal_lm(ModelSettings(save_folder(), attn_implementation=wanted), torch.float32, 1)
    assert model.config._attn_implementation == "sdpa_by_document" and own_forward_of(model).notes == []
