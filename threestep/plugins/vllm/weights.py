"""Sends trained weights to a vLLM engine, and verifies that they arrived.

vLLM's in-place reload takes a checkpoint's names and tensors one by one and processes them as at a start: join, split,
transpose, pack. The check sums the numbers' bit patterns per layer, which all of these preserve; packing (on a CPU),
after which nothing can be read back, comes after the sum. It proves that a layer holds the numbers that it was sent,
not that each is in its place.

Receives vLLM's engine as an argument, and imports nothing of it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from threestep.plugins.vllm.experts import repack_experts
from training.utils.base.errors import ThreestepError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")
_RENAMED = {
    "MixtralForCausalLM": {
        ".mlp.experts.gate_up_proj": ".block_sparse_moe.experts.w13",
        ".mlp.experts.down_proj": ".block_sparse_moe.experts.w2",
        ".mlp.gate.": ".block_sparse_moe.gate.",
    }
}
# vLLM's `reload_weights`: its configuration, the model, the weights, no folder, names of a checkpoint.
Reload = Callable[[Any, Any, Iterator[tuple[str, torch.Tensor]], None, bool], None]


class BitSums:
    """For each layer (by the first number in a weight's name; None: outside the layers) the sum of bit patterns modulo
    2**64. Zeros, with which vLLM pads a vocabulary, add nothing."""

    def __init__(self) -> None:
        self.by_layer: Counter[str | None] = Counter()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        found = _LAYER_NUMBER.search(name)
        layer = found.group(1) if found else None
        self.by_layer[layer] = (self.by_layer[layer] + int(bits.sum(dtype=torch.int64))) % 2**64

    def differing(self, other: BitSums) -> list[str]:
        """Descriptions of the layers whose sums differ."""
        layers = {**self.by_layer, **other.by_layer}
        differ = [layer for layer in layers if self.by_layer[layer] != other.by_layer[layer]]
        return ["outside the layers" if layer is None else f"layer {layer}" for layer in differ]

    @property
    def total(self) -> int:
        """The sum over all layers, whatever their names."""
        return sum(self.by_layer.values()) % 2**64


def send_weights(
    llm: Any, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, keep: bool, *, check: bool
) -> None:
    """Overwrite the weights of `llm` (vllm.LLM, in this process) with `tensors`, under a checkpoint's names.

    keep: False if a tensor is valid only until the next is requested; vLLM holds a layer's tensors until it has all of
    them, so these are copied. check: compare the sums of both sides; ThreestepError if they differ.
    """
    sent, arrived = BitSums(), BitSums()
    [architecture, *_] = llm.apply_model(lambda model: type(model).__name__)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            tensor = tensor.to(dtype) if keep or tensor.dtype != dtype else tensor.clone()
            if check:
                sent.add(name, tensor)
            yield name, tensor

    if check:
        llm.apply_model(lambda model: watch(model, arrived))
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_for_vllm(architecture, stream())})
    if check:
        llm.apply_model(lambda model: unwatch(model, arrived))
    llm.apply_model(repack_tied)
    llm.apply_model(repack_experts)
    differing = sent.differing(arrived)
    if differing:
        raise ThreestepError(
            f"vLLM's weights differ from those it was sent, in {', '.join(differing)}: it loads checkpoints of "
            "this architecture differently from how transformers stores them; use --rollout_engine hf"
        )


def named_for_vllm(
    architecture: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under names that vLLM's model reads. It reads those of Mixtral's mixtures as checkpoints have
    them (vllm 0.32, models/mixtral.py), and transformers 5 has others in memory."""
    renamed = _RENAMED.get(architecture, {})
    for name, tensor in tensors:
        for own, other in renamed.items():
            name = name.replace(own, other)
        yield name, tensor


def send_draft(llm: Any, reload: Reload, tensors: Mapping[str, torch.Tensor], check: bool) -> None:
    """Overwrite the weights of the model that `llm` drafts with, which vLLM's own reload leaves as they are. Embeddings
    and output layer, which it shares with the drawing model, are not among them.

    reload: vLLM's own for one model. tensors: in vLLM's dtype, under a checkpoint's names. check: as in `send_weights`,
    of all layers together, which have other numbers in vLLM.
    """
    sent, arrived = BitSums(), BitSums()

    def receive(worker: Any) -> None:
        draft = worker.model_runner.get_draft_model()
        if check:
            watch(draft, arrived)
        reload(worker.vllm_config, draft, iter(tensors.items()), None, True)
        if check:
            unwatch(draft, arrived)

    llm.collective_rpc(receive)
    if not check:
        return
    for name, tensor in tensors.items():
        sent.add(name, tensor)
    if sent.total != arrived.total:
        raise ThreestepError(
            "vLLM drafts with different weights from those it was sent: it loads heads of this form differently "
            "from how they are exported; remove --vllm_speculate"
        )


def watch(model: Any, sums: BitSums) -> None:
    """Sum every layer that vLLM processes after loading, just before it does."""
    names = {id(module): name for name, module in model.named_modules()}

    def sum_and_process(process: Callable[[Any], None], layer: Any) -> None:
        _add_own(sums, names[id(layer)], layer)
        process(layer)

    for method in _methods(model).values():
        method.process_weights_after_loading = partial(sum_and_process, method.process_weights_after_loading)


def unwatch(model: Any, sums: BitSums) -> None:
    """Undo that, and sum the layers that are left as loaded."""
    for method in _methods(model).values():
        del method.process_weights_after_loading  # the instance's; the class's remains
    processed = _methods(model)
    for name, module in model.named_modules():
        if id(getattr(module, "quant_method", None)) not in processed:
            _add_own(sums, name, module)


def _methods(model: Any) -> dict[int, Any]:
    """The quantization methods of vLLM's layers, by id."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return {id(method): method for method in methods if hasattr(method, "process_weights_after_loading")}


def _add_own(sums: BitSums, name: str, module: Any) -> None:
    for own, parameter in module.named_parameters(recurse=False):
        sums.add(f"{name}.{own}", parameter)


def repack_tied(model: Any) -> None:
    """On a CPU, vLLM packs each matrix once it is loaded. An output head tied to the embeddings is not loaded itself,
    and would keep what was packed from the old weights (vllm 0.32, reload/layerwise.py)."""
    tied: dict[int, list[Any]] = defaultdict(list)
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            tied[module.weight.data_ptr()].append(module)
    for modules in tied.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)
