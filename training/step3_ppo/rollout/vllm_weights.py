"""The trained weights put into a vLLM engine, and the proof that they arrived.

vLLM's own in-place reload takes names and tensors as a checkpoint has them, one after the other, and does with them
what it does at a start: join, split, transpose, pack. The proof are sums of the numbers' bit patterns, a layer at a
time: they stay the same through all that, and packing (on a CPU), after which nothing can be read back, comes after
the sum. So a layer is known to hold the numbers that it was sent, not that each stands in its place.

Knows vLLM's engine by what it is called with, and imports nothing of it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from training.utils.run.errors import ThreestepError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class BitSums:
    """Of each layer (by the first number in a weight's name; None: outside the layers) the sum of bit patterns modulo
    2**64. Zeros, with which vLLM fills a vocabulary up, add nothing."""

    def __init__(self) -> None:
        self.by_layer: Counter[str | None] = Counter()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        found = _LAYER_NUMBER.search(name)
        layer = found.group(1) if found else None
        self.by_layer[layer] = (self.by_layer[layer] + int(bits.sum(dtype=torch.int64))) % 2**64

    def differing(self, other: BitSums) -> list[str]:
        """The layers whose sums are not the same, as words."""
        layers = {**self.by_layer, **other.by_layer}
        differ = [layer for layer in layers if self.by_layer[layer] != other.by_layer[layer]]
        return ["outside the layers" if layer is None else f"layer {layer}" for layer in differ]


def send_weights(
    llm: Any, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, keep: bool, check: bool
) -> None:
    """Overwrite the weights of `llm` (vllm.LLM, in this process) by `tensors`, under the names of a checkpoint.

    keep: False where a tensor is valid only until the next is asked for; vLLM holds a layer's tensors until it has all
    of them, so these are copied. check: compare sums of both sides; ThreestepError where they differ.
    """
    sent, arrived = BitSums(), BitSums()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            tensor = tensor.to(dtype) if keep or tensor.dtype != dtype else tensor.clone()
            if check:
                sent.add(name, tensor)
            yield name, tensor

    if not check:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        llm.apply_model(_repack_tied)
        return
    llm.apply_model(lambda model: _watch(model, arrived))
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
    llm.apply_model(lambda model: _unwatch(model, arrived))
    llm.apply_model(_repack_tied)
    differing = sent.differing(arrived)
    if differing:
        raise ThreestepError(
            f"vLLM holds other weights than those that it was sent, in {', '.join(differing)}: it reads checkpoints of "
            "this architecture in another way than transformers keeps its weights; take --rollout_engine hf"
        )


def _watch(model: Any, sums: BitSums) -> None:
    """Let every layer that vLLM processes after loading be summed up just before."""
    names = {id(module): name for name, module in model.named_modules()}

    def summed_first(process: Callable[[Any], None]) -> Callable[[Any], None]:
        def sum_and_process(layer: Any) -> None:
            _add_own(sums, names[id(layer)], layer)
            process(layer)

        return sum_and_process

    for method in _methods(model).values():
        method.process_weights_after_loading = summed_first(method.process_weights_after_loading)


def _unwatch(model: Any, sums: BitSums) -> None:
    """Take that back, and add up the layers that are left as they were loaded."""
    for method in _methods(model).values():
        del method.process_weights_after_loading  # the instance's; the class's own is left
    processed = _methods(model)
    for name, module in model.named_modules():
        if id(getattr(module, "quant_method", None)) not in processed:
            _add_own(sums, name, module)


def _methods(model: Any) -> dict[int, Any]:
    """How vLLM computes with its layers, by id."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return {id(method): method for method in methods if hasattr(method, "process_weights_after_loading")}


def _add_own(sums: BitSums, name: str, module: Any) -> None:
    for own, parameter in module.named_parameters(recurse=False):
        sums.add(f"{name}.{own}", parameter)


def _repack_tied(model: Any) -> None:
    """On a CPU vLLM packs each matrix when it has been loaded. An output head that is tied to the embeddings is not
    loaded by itself, and would go on with what was packed from the old weights (vllm 0.32, reload/layerwise.py)."""
    tied: dict[int, list[Any]] = defaultdict(list)
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            tied[module.weight.data_ptr()].append(module)
    for modules in tied.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)
