"""Sums that prove that weights arrived; the folder vllm sends them for real."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from threestep.plugins.vllm.weights import BitSums, named_for_vllm, send_draft
from training.utils.base.errors import ThreestepError


def sums(**tensors: torch.Tensor) -> BitSums:
    found = BitSums()
    for name, tensor in tensors.items():
        found.add(name.replace("_", "."), tensor)
    return found


def test_joined_split_transposed_and_filled_up_weights_sum_up_alike():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, head = (torch.randn(size, 6, generator=generator).to(dtype) for size in (4, 2, 5))
        apart = sums(h_0_query=query, h_0_key=key, head=head)
        filled = torch.cat([head, torch.zeros(3, 6, dtype=dtype)])
        assert apart.differing(sums(h_0_both=torch.cat([query, key]).t(), head=filled)) == []


def test_the_layer_with_a_changed_number_is_named():
    weight = torch.ones(3, 3)
    changed = weight.clone()
    changed[1, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    whole = sums(h_0_w=weight, h_1_w=weight, head=weight)
    assert whole.differing(sums(h_0_w=weight, h_1_w=changed, head=weight)) == ["layer 1"]
    assert whole.differing(sums(h_0_w=weight, h_1_w=weight, head=changed)) == ["outside the layers"]
    assert whole.differing(sums(h_0_w=weight, head=weight)) == ["layer 1"]


def test_mixtral_has_the_names_of_its_checkpoints():
    names = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight")
    tensors = [(f"model.layers.0.{name}", torch.ones(1)) for name in names]
    assert list(named_for_vllm("Qwen3MoeForCausalLM", tensors)) == tensors
    others = ("gate.weight", "experts.w13", "experts.w2")
    renamed = [f"model.layers.0.block_sparse_moe.{name}" for name in others]
    got = [name for name, _ in named_for_vllm("MixtralForCausalLM", tensors)]
    assert got == [*renamed, "model.layers.0.self_attn.q_proj.weight"]


def test_sums_do_not_overflow():
    """2**20 numbers of the largest bit pattern below the sign: 2**20 * (2**31 - 1) is far above 2**32."""
    most = torch.full((2**20,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert sums(w=most).by_layer[None] == 2**20 * (2**31 - 1)


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_a_draft_that_holds_other_weights_is_found_out(error):
    """A draft whose layers are joined and numbered otherwise; `reload` is vLLM's, and may load wrongly."""
    draft = torch.nn.Module()
    draft.layers = torch.nn.ModuleDict({"2": torch.nn.Linear(3, 4)})

    def reload(_config, model, weights, _folder, _is_checkpoint) -> None:
        parts = dict(weights)
        with torch.no_grad():
            model.layers["2"].weight.copy_(torch.cat([parts["m.0.query"], parts["m.0.key"]]) + error)
            model.layers["2"].bias.copy_(parts["m.0.bias"])

    runner = SimpleNamespace(get_draft_model=lambda: draft)
    worker = SimpleNamespace(model_runner=runner, vllm_config=None)
    llm = SimpleNamespace(collective_rpc=lambda receive: [receive(worker)])
    tensors = {"m.0.query": torch.randn(3, 3), "m.0.key": torch.randn(1, 3), "m.0.bias": torch.randn(4)}
    send_draft(llm, reload, tensors, check=False)
    if error:
        with pytest.raises(ThreestepError, match="^vLLM drafts with other weights than it was sent: .* out$"):
            send_draft(llm, reload, tensors, check=True)
    else:
        send_draft(llm, reload, tensors, check=True)
