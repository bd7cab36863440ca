"""Fused operations in a model: which parts get them, and that outputs and gradients are the plain model's. The
operations are plain PyTorch here (`plain_kernels`); Liger's own on a GPU: tests/gpu/test_fused_on_cuda.py."""

from __future__ import annotations

import builtins
import copy
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import threestep.plugins.speed.fused.choice as choice
from tests.support.kept_bytes import kept_bytes
from tests.support.lora_settings import with_lora
from tests.support.plain_kernels import plain_kernels
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.speed.fused.choice import is_on_cuda, settle_kernels
from threestep.plugins.speed.fused.operations import (
    FusedMlp,
    FusedNorm,
    Kernels,
    fuse,
    keep_less_fused,
    liger_kernels,
    unfuse,
)
from threestep.plugins.speed.lean.forwards import keep_less
from training.utils.base.errors import ThreestepError
from training.utils.models.own_forward import current_difference, own_forward_of, read_own_forward

# Two layers, each with an attention, an MLP and its norms; the last norm.
PARTS = {"llama": 9, "qwen3": 13, "gemma2": 13, "gemma3_text": 17, "gpt2": 0, "opt": 0}
# A product's gradient by its own formula rounds otherwise than torch's two operations.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def read(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    found = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return {"logits": output.logits.detach()} | found


def drawn_ids() -> torch.Tensor:
    return torch.randint(10, 60, (3, 20), generator=torch.Generator().manual_seed(1))


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


@pytest.mark.parametrize("less", [False, True])
@pytest.mark.parametrize("family", PARTS)
def test_outputs_and_gradients_are_those_of_the_plain_model(family, less):
    model, ids = tiny_causal_lm(family).train(), drawn_ids()
    wanted = read(model, ids)
    parts = fuse(model, plain_kernels())
    assert len(parts) == PARTS[family] and fuse(model, plain_kernels()) == []
    if less:
        keep_less_fused(model)
    assert_close(read(model, ids), wanted)
    unfuse(parts)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read(model, ids).items())


def test_each_operation_is_called():
    called = set()

    def noted(name, operation):
        return lambda *given, **more: (called.add(name), operation(*given, **more))[1]

    kernels = plain_kernels()
    names = kernels._fields[1:]
    kernels = kernels._replace(**{name: noted(name, getattr(kernels, name)) for name in names})
    for family in ("llama", "gemma2"):
        model = tiny_causal_lm(family)
        fuse(model, kernels)
        model(input_ids=drawn_ids())
    assert called == set(names)


@pytest.mark.parametrize("lora", [0, 2])
def test_adapters_and_recomputation(lora):
    torch.manual_seed(1)
    model, ids = with_lora(tiny_causal_lm("llama"), lora).train(), drawn_ids()
    wanted = read(model, ids)
    assert len(fuse(model, plain_kernels())) == PARTS["llama"]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(read(model, ids), wanted)


def test_what_keeps_less_keeps_two_of_three():
    """gate, up and their product [3, 20, 48] in float32 a layer; the product is computed again. The other parts that
    keep less leave fused ones alone."""
    model, ids = tiny_causal_lm("llama").train(), drawn_ids()
    fuse(model, plain_kernels())
    assert keep_less(model) == 0
    before = kept_bytes(model, lambda: model(input_ids=ids).logits)
    keep_less_fused(model)
    assert before - kept_bytes(model, lambda: model(input_ids=ids).logits) == 2 * 3 * 20 * 48 * 4


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.float64)])
def test_tensors_elsewhere_take_the_plain_forward(device, dtype):
    """Those of another device; float64, of which kernels would keep 32 bits; and no rows at all."""
    model, ids = tiny_causal_lm("llama", dtype).train(), drawn_ids()
    wanted = read(model, ids)
    assert len(fuse(model, Kernels(device, never, never, never, never))) == PARTS["llama"]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read(model, ids).items())
    model.float()
    assert model.model.layers[0].mlp(torch.zeros(0, 32)).shape == model.model.norm(torch.zeros(0, 32)).shape == (0, 32)


def test_a_forward_that_closes_over_something_keeps_it():
    """As one that calls super() does."""
    model, ids = tiny_causal_lm("llama"), drawn_ids()
    kind: Any = type(model.model.layers[0].self_attn)

    class Attention(kind):
        def forward(self, *given: Any, **more: Any) -> Any:
            assert apply_rotary_pos_emb is not None  # a global of this module then, with another in its place
            return super().forward(*given, **more)

    wanted = model(input_ids=ids).logits
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    assert len(fuse(model, plain_kernels())) == PARTS["llama"]
    torch.testing.assert_close(model(input_ids=ids).logits, wanted, **CLOSE)


def test_norms_of_another_precision_take_the_plain_forward():
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    norm: Any = model.model.norm.float()
    x = torch.randn(2, 5, 32).bfloat16()
    wanted = norm(x)
    fuse(model, plain_kernels())
    assert isinstance(vars(norm)["forward"], FusedNorm) and wanted.dtype == torch.float32
    assert torch.equal(norm(x), wanted)


def test_a_copy_computes_by_its_own_weights():
    model, ids = tiny_causal_lm("qwen3"), drawn_ids()
    fuse(model, plain_kernels())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for part in model.parameters():
            part.zero_()
        wanted = tiny_causal_lm("qwen3")
        wanted.load_state_dict(twin.state_dict())
        torch.testing.assert_close(twin(input_ids=ids).logits, wanted(input_ids=ids).logits, **CLOSE)


# --- the choice


@pytest.fixture
def measured(monkeypatch):
    """A model that is taken for one on a GPU, and its own forward."""
    monkeypatch.setattr(choice, "is_on_cuda", lambda model: True)
    model = tiny_causal_lm("llama")
    return model, read_own_forward(model)


def test_a_cpu_takes_none_by_itself_and_refuses_them(measured, monkeypatch):
    model, own = measured
    monkeypatch.setattr(choice, "is_on_cuda", is_on_cuda)
    settle_kernels(model, own, None)
    settle_kernels(model, own, False)
    assert own.notes == [] and fuse(model, plain_kernels())
    with pytest.raises(ThreestepError, match="--use_liger_kernel: it needs a CUDA device, but there is none here"):
        settle_kernels(model, own, True)


@pytest.mark.parametrize("wanted", [None, True])
def test_what_computes_the_same_is_fused_and_noted(measured, monkeypatch, wanted):
    model, own = measured
    monkeypatch.setattr(choice, "liger_kernels", plain_kernels)
    settle_kernels(model, own, wanted)
    assert own_forward_of(model).notes == ["norms, gates and rotations use Liger's kernels in 9 modules"]
    assert sum(isinstance(vars(part).get("forward"), FusedMlp) for part in model.modules()) == 2


def test_what_comes_is_held_against_the_fused_forward(measured, monkeypatch):
    """Kernels that round otherwise, within what rounding explains: rows that are packed later have that for
    themselves."""
    model, own = measured

    def shifted(*given: Any, **more: Any) -> torch.Tensor:
        return plain_kernels().rms_norm(*given, **more) * (1 + 2**-21)

    monkeypatch.setattr(choice, "liger_kernels", lambda: plain_kernels()._replace(rms_norm=shifted))
    settle_kernels(model, own, True)
    assert 0 < current_difference(model, own) < own.tolerance
    assert current_difference(model, own_forward_of(model)) == 0


def fails(*given: Any) -> Any:
    raise RuntimeError("no such instruction\nat line 7")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"silu_mul": lambda gate, up: gate * up},
            r"log-probabilities or scores change by [\d.e+]+ \(rounding explains",
        ),
        ({"rotate": fails}, r"they fail here \(RuntimeError: no such instruction\)"),
    ],
    ids=["something else", "failing"],
)
def test_what_computes_something_else_is_taken_back(measured, monkeypatch, changed, reason):
    model, own = measured
    monkeypatch.setattr(choice, "liger_kernels", lambda: plain_kernels()._replace(**changed))
    with pytest.raises(ThreestepError, match=f"^--use_liger_kernel: .*{reason}.*; leave --use_liger_kernel out$"):
        settle_kernels(model, own, True)
    assert not any("forward" in vars(part) for part in model.modules())
    settle_kernels(model, own, None)
    assert len(own.notes) == 1 and own.notes[0].startswith("norms, gates and rotations use the model's own kernels: ")
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("lacking", ["liger_kernel", "triton"])
def test_without_the_package_the_model_stays_as_it_is(measured, monkeypatch, lacking):
    """A package that is there and broken, as without Triton, which it needs, is noted."""
    model, own = measured
    plain_import = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        if name.startswith("liger_kernel"):
            raise ModuleNotFoundError(f"No module named '{lacking}'", name=lacking)
        return plain_import(name, *others, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError):
        liger_kernels()
    settle_kernels(model, own, None)
    assert len(own.notes) == (lacking == "triton")
    assert all("liger-kernel cannot be imported (No module named 'triton')" in note for note in own.notes)
    with pytest.raises(ThreestepError, match=r"cannot be imported .*pip install -e '\.\[liger\]'"):
        settle_kernels(model, own, True)
    monkeypatch.setattr(choice, "liger_kernels", plain_kernels)
    model = tiny_causal_lm("gpt2")
    with pytest.raises(ThreestepError, match="no part of GPT2LMHeadModel matches what these kernels compute"):
        settle_kernels(model, read_own_forward(model), True)


def never(*given: Any, **more: Any) -> Any:
    raise AssertionError("a kernel was called")
