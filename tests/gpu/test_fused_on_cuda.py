"""Liger Kernel's operations on a GPU: the outputs and gradients of the plain model. Parts that keep less: its bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.speed.fused.operations import FusedMlp, fuse, keep_less_fused, liger_kernels
from threestep.plugins.speed.lean.forwards import keep_less

pytestmark = pytest.mark.gpu
# Times the plain model's own distance from float64: with weights this wide bfloat16 rounds some by a fifth.
MOST_TIMES = 4.0


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("liger_kernel")
    return liger_kernels()


def read(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    read = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    return read | {name: part.grad for name, part in model.named_parameters()}


def other_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The embedding's backward adds rows in no fixed order on CUDA."""
    return [name for name in one if "embed" not in name and not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("less", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "parts"), [("llama", 9), ("qwen3", 13), ("gemma2", 13), ("gemma3_text", 17)])
def test_outputs_and_gradients_are_as_near_to_float64_as_the_plain_model_s(kernels, family, parts, dtype, less):
    torch.manual_seed(1)
    plain = tiny_causal_lm(family).to("cuda", dtype).train()
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert len(fuse(fused, kernels)) == parts
    if less:
        keep_less_fused(fused)
        assert any(getattr(vars(part).get("forward"), "keeps_less", False) for part in fused.modules())
    ids = torch.randint(10, 60, (4, 40), device="cuda")
    wanted, ours, theirs = read(exact, ids), read(fused, ids), read(plain, ids)
    for name, tensor in wanted.items():
        apart, usual = (float((found[name].double() - tensor).norm() / tensor.norm()) for found in (ours, theirs))
        assert apart < MOST_TIMES * usual + 1e-6, f"{name}: {apart}, where the plain model is {usual} off"


def test_both_ways_of_keeping_give_the_same_bits(kernels):
    ids = torch.randint(10, 60, (4, 40), device="cuda")
    found = []
    for less in (False, True):
        torch.manual_seed(1)
        model = tiny_causal_lm("llama").to("cuda", torch.bfloat16).train()
        for part in fuse(model, kernels):
            if isinstance(forward := vars(part)["forward"], FusedMlp):
                forward.keeps_less = less
        found.append(read(model, ids))
    assert not other_bits(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_parts_that_keep_less_give_the_bits_of_the_plain_model(family, dtype):
    torch.manual_seed(1)
    plain, lean = (tiny_causal_lm(family).to("cuda", dtype).train() for _ in range(2))
    lean.load_state_dict(plain.state_dict())
    assert keep_less(lean) > 0
    ids = torch.randint(10, 60, (4, 40), device="cuda")
    assert {*other_bits(read(plain, ids), read(lean, ids))} <= {"logits"}
