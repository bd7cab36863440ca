"""Layer inputs on the host: the same gradients to the bit, one copy each way a layer and no wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.cuda_stand_in.device import counted
from tests.support.random_rows import random_rows
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.speed.activation_offload import OffloadedInput, check_offloads, offload_inputs
from threestep.plugins.speed.tests.fast_settings import fast
from training.utils.base.errors import ThreestepError
from training.utils.loading.models import prepared
from training.utils.models.token_model import PolicyModel

LAYERS = 4


def recomputed(family: str, offloads: bool, **changes: Any) -> Any:
    settings = fast(dropout=0.0, gradient_checkpointing=True, activation_offload=offloads, **changes)
    torch.manual_seed(1)
    depth = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    return prepared(tiny_causal_lm(family, **depth), settings).train()


def gradients(model: Any, rows: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    PolicyModel(model)(rows).logprobs_M.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("gpt2", {}), ("llama", {"lora_dim": 2}), ("llama", {"mlp_tiles": 3})]
)
def test_gradients_are_those_of_recomputation_to_the_bit(family, changes):
    """Also where the host's memory is the device's, which a run refuses."""
    rows = random_rows(torch.Generator().manual_seed(2), 3, 6)
    wanted, found = (gradients(recomputed(family, offloads, **changes), rows) for offloads in (False, True))
    assert wanted.keys() == found.keys() and wanted
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_layers_are_wrapped_once_and_those_alone_that_recompute():
    model = recomputed("llama", True)
    offload_inputs(model)
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert all(isinstance(each, OffloadedInput) for each in functions)
    assert not any(isinstance(each.recompute, OffloadedInput) for each in functions)
    plain = tiny_causal_lm("llama")
    offload_inputs(plain)
    assert not hasattr(plain.model.layers[0], "_gradient_checkpointing_func")


def on_the_device() -> dict:
    """Gradients with and without, and what each costs beside the same operators."""
    rows, found, costs = random_rows(torch.Generator().manual_seed(2), 3, 6).to("cuda"), [], []
    for offloads in (False, True):
        model = recomputed("llama", False).to("cuda")
        if offloads:
            offload_inputs(model)
        with counted() as counts:
            found.append(gradients(model, rows))
        costs.append({**counts.totals(), "lines": counts.lines()})
    equal = all(torch.equal(found[1][name], each) for name, each in found[0].items())
    return {"equal": equal, "plain": costs[0], "offloaded": costs[1]}


def test_on_a_gpu_inputs_go_to_pinned_memory_and_back_without_a_wait(on_cuda):
    found = on_cuda(on_the_device)
    assert found["equal"]
    more = {kind: found["offloaded"][kind] - found["plain"][kind] for kind in ("waits", "to_device", "from_device")}
    assert more == {"waits": 0, "to_device": LAYERS, "from_device": LAYERS}
    lines = [line for line in found["offloaded"]["lines"] if "activation_offload.py" in line]
    assert lines and all("pinned, without waiting" in line for line in lines)


def test_a_cpu_is_refused():
    with pytest.raises(ThreestepError, match="on a CPU they are there; leave it out"):
        check_offloads(False)
    check_offloads(True)
