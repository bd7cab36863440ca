"""What ZeRO-3 may hold whole and gather ahead, by size, memory and device; the copy that it lends to rollouts, made
when it is first lent, and never larger than it has to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.devices import host_share
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.whole_model import WholeModel
from training.utils.engine.zero3 import ModelSizes, limits_of, model_sizes, zero3_limits

B7 = ModelSizes(weights=6_700_000_000, block=202_000_000, module=131_000_000)
B70 = ModelSizes(weights=70_000_000_000, block=856_000_000, module=1_051_000_000)


def live_and_ahead(sizes: ModelSizes, size: int, memory: float | None, on_gpu: bool = True) -> tuple[int, int]:
    limits = zero3_limits(sizes, size, None if memory is None else int(memory), on_gpu)
    assert limits["stage3_max_reuse_distance"] == limits["stage3_max_live_parameters"]
    return limits["stage3_max_live_parameters"], limits["stage3_prefetch_bucket_size"]


TINY = ModelSizes(weights=1000, block=300, module=100)


@pytest.mark.parametrize(
    ("sizes", "memory", "on_gpu", "wanted"),
    [
        # a CPU has room for two blocks, or a block and the largest module
        (B7, 256e9, False, (404_000_000, 202_000_000)),
        (B70, 256e9, False, (1_907_000_000, 856_000_000)),
        # a GPU with memory to spare has DeepSpeed's default at least
        (B7, 80e9, True, (1_000_000_000, 202_000_000)),
        (B7, None, True, (1_000_000_000, 202_000_000)),
        (B70, 80e9, True, (1_907_000_000, 856_000_000)),
        # never more than the model
        (TINY, 80e9, True, (1000, 300)),
        (ModelSizes(1, 1, 1), 80e9, False, (1, 1)),
    ],
)
def test_what_is_held_and_gathered_ahead(sizes, memory, on_gpu, wanted):
    assert live_and_ahead(sizes, 2, memory, on_gpu) == wanted


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_tenth_of_the_memory_is_the_most(size, on_gpu):
    live, ahead = live_and_ahead(B70, size, 16e9, on_gpu)
    assert live * size == 1.6e9 and ahead <= live
    assert live_and_ahead(B70, size, 1e6, on_gpu) == (30_000_000, 30_000_000)


def test_the_sizes_of_a_model():
    model = nn.Module()
    model.table = nn.Embedding(50, 8)
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    assert model_sizes(model) == ModelSizes(weights=400 + 3 * 144, block=144, module=400)
    assert model_sizes(nn.Linear(3, 2)) == ModelSizes(8, 8, 8)
    assert model_sizes(model.to("meta")).block == 144 and torch.device("meta") == model.table.weight.device


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    whole = host_share(1)
    assert whole > 2**30 and host_share(4) == whole // 4
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert host_share(4) == whole // 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_share(16) == whole // 8


def test_the_rank_with_the_least_memory_decides(monkeypatch):
    """Ranks that gathered in another order would wait for each other for ever."""
    from training.utils.engine import zero3 as module

    wide = nn.Linear(50_000, 50_000, bias=False, device="meta")
    ranks, settings = Ranks(0, 0, 1, torch.device("cpu")), EngineSettings(zero_stage=3)
    monkeypatch.setattr(module, "largest", lambda number, device: max(number, -int(4e9)))
    assert limits_of(wide, settings, ranks)["stage3_max_live_parameters"] == 100_000_000
    assert limits_of(wide, EngineSettings(zero_stage=2), ranks) == {}


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
    trained.train()
    with whole_of(trained, zero_stage=2).lent() as lent:  # below stage 3 the model itself
        assert lent is trained and not trained.training
    assert trained.training
