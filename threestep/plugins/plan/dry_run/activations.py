"""The memory of a forward and its backward besides the weights: activations, output layer, key-value cache.

Activations are counted, not guessed: the model runs on the meta device, where a tensor has a shape and no memory, and
the tensors that autograd saves for the backward are added up. For a GPT layer in half precision that gives the terms of
Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4) without the
attention matrix, which no kernel used here saves; for other families, whatever their layers save (plan/memory.md).

N rows, T tokens in a row, H hidden size, V vocabulary, A heads, K key-value heads, D head size.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from training.utils.models.attention import SDPA
from training.utils.models.settings import ModelPreparer, keeping_all
from training.utils.models.token_model import CHUNK_MB

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_COUNTED = "counted_attention"
_WITHOUT_A_SQUARE_MASK = ("bloom", "openai-gpt")  # ALiBi or a mask of their own, made from one of two dimensions


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that a forward saves for its backward.

    layers: of each decoder layer
    outside: of modules in no layer
    boundary: one layer's input [N, T, H], all that gradient checkpointing saves of a layer
    widest: the largest tensor
    piece: of a part's piece, if parts are computed in pieces; layers have the parts' inputs alone then
    """

    layers: tuple[int, ...]
    outside: int
    boundary: int
    widest: int
    piece: int = 0

    @property
    def layer(self) -> int:
        """Bytes of the layer that saves most, on its own."""
        return max(self.layers, default=0) + self.piece

    def held(self, gradient_checkpointing: bool, offloaded: bool = False) -> int:
        """Everything; or with checkpointing the inputs of the layers, and one layer computed again (Chen et al. 2016,
        "Training Deep Nets with Sublinear Memory Cost", one segment a layer). offloaded: of the inputs, that of this
        layer alone."""
        if not gradient_checkpointing:
            return self.outside + sum(self.layers) + self.piece
        return self.outside + (1 if offloaded else len(self.layers)) * self.boundary + self.layer


def saved_activations(
    model: PreTrainedModel,
    rows: int,
    tokens: int,
    attention: str = SDPA,
    *,
    in_float32: bool = False,
    preparers: Sequence[ModelPreparer] = (),
    keep_all: bool = False,
) -> SavedActivations:
    """Count the bytes that a forward of `rows` rows of `tokens` tokens saves, without the weights. `model` is on meta,
    in train mode. Layers of one kind save the same: only enough of them run to see each kind. With attention by sdpa,
    key-value heads are repeated for their query heads, and the copies saved. in_float32: attention is computed in
    float32 whatever the model's precision, as a CPU does with short runs (`attention_precision`). preparers: by which
    parts may be computed in pieces, one after the other. keep_all: parts that keep less keep all that autograd saves,
    as those of recomputed and compiled layers do."""
    base: Any = model.base_model
    pieces = next((each for each in preparers if each.in_pieces), ModelPreparer())
    layers = decoder_layers(base)
    kinds = [layer_kind(layer) for layer in layers]
    counting = SavedTensors({part.untyped_storage()._cdata for part in [*base.parameters(), *base.buffers()]})
    # A kind's second layer is counted if there is one: tensors that all layers share are saved in the first.
    length = max((kinds.index(kind) for kind in kinds), default=-1) + 2
    with (
        shortened(base, layers, length) as run,
        _counted_attention(model, repeats=attention == SDPA, in_float32=in_float32),
    ):
        parts = pieces.parts_in_pieces(model, functools.partial(read_on_meta, base, rows))
        hooks = [*counted_apart(run, counting), *parts_apart(parts, counting)]
        try:
            with (
                keeping_all(base.modules() if keep_all else [part for each in parts.values() for part in each]),
                torch.autograd.graph.saved_tensors_hooks(counting, lambda tensor: tensor),
            ):
                read_on_meta(base, rows, tokens)
        finally:
            for hook in hooks:
                hook.remove()
    of_kind = {layer_kind(layer): counting.bytes[id(layer)] for layer in run}
    inside = {id(part) for each in parts.values() for part in each}
    share = pieces.piece_tokens(tokens) / tokens
    return SavedActivations(
        layers=tuple(of_kind[kind] for kind in kinds),
        outside=counting.bytes[0],
        boundary=counting.boundary,
        widest=int(max((most * (share if at in inside else 1) for at, most in counting.widest_in.items()), default=0)),
        piece=int(share * max((counting.bytes[part] for part in inside), default=0)),
    )


def read_on_meta(base: Any, rows: int, tokens: int) -> Any:
    """The output of a forward of `rows` rows of `tokens` tokens through the body `base`, which is on meta."""
    ids_NT = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
    mask = None
    if base.config.model_type not in _WITHOUT_A_SQUARE_MASK:
        mask = torch.zeros((), dtype=torch.bool, device="meta").expand(rows, 1, tokens, tokens)
    return base(input_ids=ids_NT, position_ids=ids_NT, attention_mask=mask, use_cache=False)


def counted_apart(layers: Sequence[nn.Module], counting: SavedTensors) -> list[RemovableHandle]:
    """Count each layer's saved tensors separately, and its largest input; return the hooks."""

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counting.within = id(layer)
        hidden = args[0] if args else kwargs["hidden_states"]
        counting.boundary = max(counting.boundary, hidden.numel() * hidden.element_size())

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        counting.within = 0

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    return [*hooks, *(layer.register_forward_hook(leave) for layer in layers)]


def parts_apart(parts: Mapping[nn.Module, Sequence[nn.Module]], counting: SavedTensors) -> list[RemovableHandle]:
    """Count what parts of layers save beside their inputs, which are the layer's, separately; return the hooks."""
    hooks = []
    for layer, several in parts.items():
        for part in several:

            def enter(part: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                counting(args[0])
                counting.within = id(part)

            def leave(part: nn.Module, args: Any, output: Any, layer: nn.Module = layer) -> None:
                counting.within = id(layer)

            hooks += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    return hooks


def head_bytes(
    model: PreTrainedModel, targets: int, positions: int, with_entropy: bool = False, *, chunk_mb: int = CHUNK_MB
) -> int:
    """Peak bytes of reading `targets` log-probabilities of `positions` tokens, forward or backward.

    A chunk of logits and its gradient, in float32 and in the model's precision (`TargetHead`), and the gradient of the
    head's weight. Families that change their logits after the head hold all logits at once, twice.
    """
    from training.utils.models.token_model import PolicyModel

    head: Any = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    size = head.weight.element_size()
    narrow = 0 if size >= 4 else size  # float32 logits are not converted
    base: Any = model.base_model
    with shortened(base, decoder_layers(base), 1):  # whose forward shows what follows the head
        is_linear = PolicyModel(model)._target_head is not None
    if not is_linear:
        return positions * vocabulary * 3 * size + targets * vocabulary * (4 + 4 + narrow)
    chunk = max(1, chunk_mb * 2**20 // (4 * vocabulary))
    logits = min(targets, chunk) * vocabulary * (4 + narrow + (8 if with_entropy else 0))
    wide = 4 if targets > chunk else size
    return logits + (vocabulary * width * wide if head.weight.requires_grad else 0)


def cache_bytes(config: Any, sequences: int, tokens: int, element_bytes: int, *, largest_layer: bool = False) -> int:
    """Bytes of the key-value cache of `sequences` of `tokens` tokens: 2 x K x D numbers a token and layer (Pope et al.
    2022, "Efficiently Scaling Transformer Inference", section 3.3), and of a sliding window no more than its width.
    Layers without attention are not counted. largest_layer: of the layer that holds most, alone."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or tokens
    held = [
        min(tokens, window) if kind == "sliding_attention" else tokens
        for kind in kinds
        if kind.endswith("attention") and kind != "linear_attention"
    ]
    counted = max(held, default=0) if largest_layer else sum(held)
    return 2 * key_value_heads * size * counted * sequences * element_bytes


class SavedTensors:
    """A pack hook of torch.autograd.graph.saved_tensors_hooks: each storage counts once, where it is first saved."""

    def __init__(self, weights: set[int]) -> None:
        self.within = 0  # the layer; 0 outside of all
        self.bytes: Counter[int] = Counter()
        self.widest_in: Counter[int] = Counter()
        self.boundary = 0
        self._seen = weights
        self._saved: list[torch.Tensor] = []  # a freed storage could pass its address on to another

    @property
    def widest(self) -> int:
        """Bytes of the largest tensor."""
        return max(self.widest_in.values(), default=0)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._saved.append(tensor)
            self.widest_in[self.within] = max(self.widest_in[self.within], storage.nbytes())
            self.bytes[self.within] += storage.nbytes()
        return tensor


def decoder_layers(base: Any) -> list[Any]:
    """The layers that gradient checkpointing computes again."""
    return [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """A key of a layer: those with weights of the same shapes and attention of the same reach save the same."""
    shapes = tuple((name, tuple(part.shape), part.requires_grad) for name, part in layer.named_parameters())
    return type(layer), getattr(layer, "attention_type", None), shapes


@contextlib.contextmanager
def shortened(base: Any, layers: list[Any], length: int) -> Iterator[list[Any]]:
    """Inside, the model has only its first `length` layers, which are returned; all of them if it has them in more than
    one list."""
    parents = [module for module in base.modules() if isinstance(module, nn.ModuleList) and list(module) == layers]
    if len(parents) != 1 or length >= len(layers):
        yield layers
        return
    text_config = base.config.get_text_config()
    depth, text_config.num_hidden_layers = text_config.num_hidden_layers, length
    del parents[0][length:]
    try:
        yield layers[:length]
    finally:
        text_config.num_hidden_layers = depth
        parents[0].extend(layers[length:])


class _SavedByKernel(torch.autograd.Function):
    """The tensors that a memory-efficient attention kernel saves: queries, keys, values, output, and a float32 number
    a query (Dao et al. 2022, "FlashAttention", section 3.1)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Kernels write [N, T, A, D]: bringing it into that order copies nothing.
        count, heads, width, _ = query.shape
        output = query.new_empty(count, width, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("a count has no backward")


@contextlib.contextmanager
def _counted_attention(model: PreTrainedModel, repeats: bool, in_float32: bool) -> Iterator[None]:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        if repeats and groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        wide = torch.promote_types(query.dtype, torch.float32) if in_float32 else query.dtype
        output = _SavedByKernel.apply(*(part.to(wide) for part in (query, key, value)))
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    with attention_by(model, attention):
        yield


@contextlib.contextmanager
def attention_by(model: PreTrainedModel, attention: Callable[..., tuple[torch.Tensor, None]]) -> Iterator[None]:
    """Inside, `model` calls `attention` for its attention, and makes no masks."""
    before = model.config._attn_implementation
    AttentionInterface.register(_COUNTED, attention)
    AttentionMaskInterface.register(_COUNTED, lambda *args, **kwargs: None)
    model.config._attn_implementation = _COUNTED
    try:
        yield
    finally:
        model.config._attn_implementation = before
