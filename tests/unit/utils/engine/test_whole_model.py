"""The copy that ZeRO-3 lends to rollouts: made when it is first lent, and never larger than it has to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from training.utils.engine.whole_model import WholeModel


class Allocated(TorchDispatchMode):
    """Counts bytes of new storages that are not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._seen:
                    self._seen[storage._cdata] = leaf
                    self.bytes += storage.nbytes()
        return result


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def trained(request) -> Any:
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    config = AutoConfig.for_model("llama", **shape, tie_word_embeddings=request.param)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def whole_of(model: Any, zero_stage: int = 3) -> WholeModel:
    """Of an engine whose shards are taken for gathered."""
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(zero_stage=zero_stage),
        ranks=SimpleNamespace(device=torch.device("cpu")),
        full_tensors=lambda part: part.named_parameters(),
    )
    return WholeModel(engine, model)


def of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_nothing_is_made_before_it_is_lent_and_no_more_than_the_weights_then(trained):
    buffers = of(trained.buffers())
    with Allocated() as at_start:
        whole = whole_of(trained)
        assert sum(of([tensor]) for _, tensor in whole.tensors()) > 0  # what vLLM takes
    assert at_start.bytes == 0 and whole.is_sharded
    with Allocated() as lending, whole.lent() as copy:
        assert of(copy.parameters()) == of(trained.parameters())
    weights = of(trained.parameters())
    assert weights <= lending.bytes <= weights + 2 * buffers + 64
    assert of(copy.parameters()) == 0


def test_it_is_the_same_function_each_time(trained):
    ids, whole = torch.arange(10).view(1, 10), whole_of(trained)
    for _ in range(2):
        with torch.no_grad(), whole.lent() as copy:
            assert not copy.training and not any(weight.requires_grad for weight in copy.parameters())
            is_tied = copy.get_input_embeddings().weight is copy.get_output_embeddings().weight
            assert is_tied == trained.config.tie_word_embeddings
            assert torch.equal(copy(ids).logits, trained(ids).logits)
            assert all(buffer.dtype is torch.float32 for buffer in copy.buffers() if buffer.is_floating_point())
        trained.get_input_embeddings().weight.data.mul_(1.5)


def test_below_stage_3_the_model_itself_is_lent(trained):
    trained.train()
    with whole_of(trained, zero_stage=2).lent() as lent:
        assert lent is trained and not trained.training
    assert trained.training
