"""Count the operators of a real model on the meta device, where a tensor has a shape and no memory.

The forward and torch's own backward run under a dispatch mode, which sees every operator with its shapes: matmuls are
counted by shape, other operators by the bytes of their tensors, attention by its visible pairs. So frozen weights,
adapters, gates, biases and mixtures cost what they cost.

N rows, T tokens in a row, A heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from threestep.plugins.plan.clock.work import Matmul, TrainingWork, Work
from threestep.plugins.plan.dry_run.activations import attention_by, decoder_layers, layer_kind, read_on_meta, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}  # where the first factor is
_DOES_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias")

_QUERIES_OF_A_BLOCK = 32  # of documents up to 191 tokens; longer ones have larger blocks, which are faster
KINDS = PRODUCT, ATTENTION, MEMORY_BOUND, VIEW = "product", "attention", "memory-bound", "view"


def operator_kind(func: Any) -> str:
    """PRODUCT, ATTENTION, MEMORY_BOUND, or VIEW for what computes nothing. func: as dispatch modes get it."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS:
        return PRODUCT
    if name in _DOES_NOTHING or func.is_view or name.startswith(("_unsafe_view", "_reshape_alias")):
        return VIEW
    return ATTENTION if "scaled_dot_product" in name else MEMORY_BOUND


class OperatorCount(TorchDispatchMode):
    """Counts what runs inside. Storages are held until it ends, since a freed one could pass its address on."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self._kept: list[torch.Tensor] = []
        self._written: set[int] = set()  # storages that memory-bound operators wrote, and no other has read yet
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, kind = func.overloadpacket.__name__, operator_kind(func)
        read = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        written = [part for part in tree_leaves(result) if isinstance(part, torch.Tensor)]
        self._kept += written
        if kind == PRODUCT:
            self._product(name, args, read, written)
        elif kind != VIEW:
            self._memory_bound(read, written)
        return result

    def attention(self, flops: float, masked: float, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Add one call of an attention kernel on rows of one document each. masked: FLOPs of what blocks of a CPU's
        kernel compute in vain. made: each is put together from what its documents make, where these are computed one by
        one."""
        documents = made[0].shape[0]
        self._add(
            Work(
                attention_flops=flops,
                launches=1,
                fused_bytes=self._handed_over(read),
                apart_documents=documents - 1,
                apart_launches=len(made),
                apart_bytes=2.0 * sum(map(_bytes, made)),
                apart_flops=masked,
            )
        )

    def _product(self, name: str, args: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        done = Work(launches=1, fused_bytes=self._handed_over(read))
        done.matmuls[_shape(left, right, written[0])] += 1
        self._add(done)

    def _memory_bound(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        moved = float(sum(map(_bytes, [*read, *written])))
        first = [part for part in read if _storage(part) not in self._written | self._read]
        fused = float(sum(map(_bytes, first)))
        self._read.update(map(_storage, first))
        self._written.update(map(_storage, written))
        self._add(Work(moved_bytes=moved, fused_bytes=fused, launches=1))

    def _handed_over(self, read: list[torch.Tensor]) -> float:
        """Bytes that memory-bound operators must have written for another operator to read them."""
        handed = [part for part in read if _storage(part) in self._written]
        self._written.difference_update(map(_storage, handed))
        return float(sum(map(_bytes, handed)))

    def _add(self, done: Work) -> None:
        self.work = self.work.plus(done)


def masked_pairs(tokens: int) -> float:
    """Masked pairs of a causal document that a CPU's kernel computes, whose blocks of queries see the keys up to their
    last one (torch 2.13, FlashAttentionKernel.cpp)."""
    return tokens * (_QUERIES_OF_A_BLOCK - 1) / 2


def training_work(model: PreTrainedModel, rows: int, tokens: int, targets: int) -> TrainingWork:
    """Count the work of training on `rows` rows of `tokens` tokens, of which `targets` are predicted. `model` is on the
    meta device. Layers of one kind do the same: two of them run, and stand for all."""
    base: Any = model.base_model
    layers = decoder_layers(base)
    if len(layers) < 3 or len({layer_kind(layer) for layer in layers}) > 1:
        forward, backward = _body(model, rows, tokens, len(layers))
    else:
        one, two = (_body(model, rows, tokens, length) for length in (1, 2))
        forward, backward = (
            first.plus(second.plus(first, -1), len(layers) - 1) for first, second in zip(one, two, strict=True)
        )
    return TrainingWork(forward, backward, _head(model, targets))


def _body(model: Any, rows: int, tokens: int, length: int) -> tuple[Work, Work]:
    """Forward and backward of the body with its first `length` layers."""
    base = model.base_model
    with shortened(base, decoder_layers(base), length), OperatorCount() as count, _counted_attention(model, count):
        hidden = read_on_meta(base, rows, tokens)[0]
        forward, count.work = count.work, Work()
        if hidden.requires_grad:
            hidden.backward(torch.empty_like(hidden))
        for part in base.parameters():
            part.grad = None
    return forward, count.work


def _head(model: Any, targets: int) -> Work:
    """The output layer at `targets` positions, its log-probabilities in float32, and their backward."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return Work()
    hidden = torch.empty(targets, head.weight.shape[1], dtype=head.weight.dtype, device="meta", requires_grad=True)
    with OperatorCount() as count:
        logits = head(hidden).float()
        chosen = logits.log_softmax(-1).gather(1, torch.empty(targets, 1, dtype=torch.int64, device="meta"))
        chosen.backward(torch.empty_like(chosen))
    head.weight.grad = None
    return count.work


@contextmanager
def _counted_attention(model: Any, count: OperatorCount) -> Iterator[None]:
    def attention(module: Any, *inputs: Any, **others: Any) -> tuple[torch.Tensor, None]:
        query, key, value, *_ = inputs
        window = getattr(module, "sliding_window", None)
        return _Attention.apply(query, key, value, count, window), None

    with attention_by(model, attention):
        yield


class _Attention(torch.autograd.Function):
    """Causal attention that writes [N, T, A, D]. 4 FLOPs a visible pair and unit of width forward, 10 backward: the
    scores are computed again (Dao et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, *counted: Any) -> torch.Tensor:
        count, window = counted
        rows, heads, tokens, width = query.shape
        reach = min(tokens, window or tokens)
        pairs = reach * (reach + 1) / 2 + (tokens - reach) * reach
        each = rows * heads * (width + value.shape[-1])  # of a pair, in each of its two products
        ctx.count, ctx.flops, ctx.masked = count, each * pairs, each * masked_pairs(tokens)
        ctx.save_for_backward(query, key, value)
        output = query.new_empty(rows, tokens, heads, value.shape[-1])
        count.attention(2 * ctx.flops, 2 * ctx.masked, [query, key, value], [output])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made = [torch.empty_like(part) for part in ctx.saved_tensors]
        ctx.count.attention(5 * ctx.flops, 5 * ctx.masked, list(grads), made)
        return *made, None, None


def _shape(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> Matmul:
    """The shape of a product; of stacked experts, with the rows that each has on the average."""
    batch = max(prod(part.shape[:-2]) for part in (left, right, result))
    total = left.shape[-1] * left.shape[-2] * (prod(left.shape[:-2]) if left.dim() > 2 else 1)
    rows, columns = result.shape[-2:]
    inner = left.shape[-1]
    if left.dim() == 2 and right.dim() == 3:  # tokens of all experts by each expert's weights
        rows = max(1, rows // batch)
    elif batch > 1 and left.dim() == 2:  # a gradient of each expert's weights
        inner = max(1, total // left.shape[-2] // batch)
    return Matmul(batch, rows, columns, inner)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
