"""Memory of a rank that trains one model: its engine's, and its largest forward's and backward's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from threestep.plugins.plan.dry_run.activations import SavedActivations, head_bytes, saved_activations
from threestep.plugins.plan.dry_run.attention_memory import mask_lines
from threestep.plugins.plan.dry_run.engine_memory import EngineMemory, power_of_two, trained_memory
from training.utils.base.machine import MemoryLine, Moment
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.devices import host_share
from training.utils.engine.ranks.startup import DTYPES
from training.utils.engine.zero3 import ModelSizes, model_sizes, zero3_limits
from training.utils.layout.bounds import forward_bound
from training.utils.models.attention import SDPA
from training.utils.models.attention_choice import planned_attention
from training.utils.models.token_model import CHUNK_MB, chunk_mb_for
from training.utils.models.weights import count_weights, packed_layers

if TYPE_CHECKING:
    from training.utils.base.machine import PlannedDevice
    from training.utils.contracts.media import PlannedMedia
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.models.settings import ModelSettings


@dataclass(frozen=True)
class LargestForward:
    """The most that one forward of a rank may hold: `rows` rows of `tokens` tokens each, with `targets` tokens to
    predict in all. masked: a dense mask says which token sees which. media: that may fill it. sharing:
    ranks that share the rows, each with a slice; the mask is of whole rows."""

    rows: int
    tokens: int
    targets: int
    masked: bool
    with_entropy: bool = False
    media: PlannedMedia | None = None
    sharing: int = 1

    @property
    def slice_tokens(self) -> int:
        """Tokens of a row that one rank computes."""
        return -(-self.tokens // self.sharing)


@dataclass(frozen=True)
class PlannedModel:
    """A model that will be trained. engine: its memory; forward: memory that its largest forward and backward add,
    activations first; layer_bytes: of the largest layer's activations."""

    sentences: tuple[str, ...]
    engine: EngineMemory
    forward: tuple[MemoryLine, ...]
    layer_bytes: int

    @property
    def moments(self) -> tuple[Moment, Moment]:
        """The height of a backward, and the optimizer's step."""
        backward = Moment("in a backward", (self.engine.buffers, *self.forward))
        return backward, Moment("in the optimizer step", (self.engine.stepping,))


def plan_training(
    model: Any,
    forward: LargestForward,
    loading: ModelSettings,
    settings: EngineSettings,
    *,
    ranks: int,
    device: PlannedDevice,
    count: Callable[..., SavedActivations] = saved_activations,
) -> PlannedModel:
    """Return the memory of one rank that trains `model`, which is on the meta device. count: its activations."""
    trained = _trained_elements(model)
    config, engine = engine_of(model, settings, ranks, device)
    engine, whole_layer = _with_packed_weights(engine, model)
    attention = planned_attention(model, loading.attn_implementation, device.is_cuda, loading.dropout)
    by_document = not (device.is_cuda or loading.compiles) and getattr(model, "_supports_attention_backend", False)
    in_float32 = by_document and attention == SDPA and settings.dtype == "bf16"
    for preparer in loading.preparers:
        preparer.check_device(device.is_cuda)
    counted = (model, forward.rows, forward.slice_tokens, attention)
    keep_all = loading.gradient_checkpointing or loading.compiles  # as `prepared` leaves them
    saved = count(*counted, in_float32=in_float32, preparers=loading.preparers, keep_all=keep_all)
    held = saved.held(loading.gradient_checkpointing, inputs_on_host(loading))
    beside = [] if forward.media is None else forward.media.lines(model, loading.gradient_checkpointing, held)
    recomputed = ", recomputed by layers" if loading.gradient_checkpointing else ""
    recomputed += "".join(f", {each.planned}" for each in loading.preparers if each.planned)
    lines = [
        MemoryLine(f"activations{recomputed}", held),
        MemoryLine("layer inputs in pinned host memory", 0, pinned_inputs(saved, loading)),
        MemoryLine("gradients of activations", 3 * saved.widest),
        *whole_layer,
        *beside,
    ]
    if forward.masked:
        lines += mask_lines(
            attention,
            forward.rows,
            forward.tokens,
            1 if loading.gradient_checkpointing else len(saved.layers),
            element_bytes=DTYPES[settings.dtype].itemsize,
            by_document=by_document,
        )
    if model.get_output_embeddings() is not None:
        positions = forward.rows * forward.slice_tokens
        chunk_mb = loading.head_chunk_mb or planned_chunk_mb(model, settings.dtype, device)
        logits = head_bytes(model, min(forward.targets, positions), positions, forward.with_entropy, chunk_mb=chunk_mb)
        lines.append(MemoryLine("logits", logits))
    adapters = "".join(f", {each.adapters}" for each in loading.preparers if each.adapters)
    if loading.weights_form:
        adapters += f" on weights in {loading.weights_form}"
    sentences = [
        (
            f"model: {type(model).__name__}, {count_weights(model):,} weights ({trained:,} trained){adapters}; "
            f"{settings.dtype}, attention {attention}, gradient checkpointing "
            f"{'on' if loading.gradient_checkpointing else 'off'}"
        ),
        f"DeepSpeed: {json.dumps(config)}",
    ]
    if beside and forward.media is not None:
        sentences.append(forward.media.sentence)
    return PlannedModel(tuple(sentences), engine, tuple(lines), saved.layer or saved.widest)


def pinned_inputs(saved: SavedActivations, loading: ModelSettings) -> int:
    """Bytes of the layer inputs that a backward finds on the host, in blocks that are powers of two."""
    return len(saved.layers) * power_of_two(saved.boundary) if inputs_on_host(loading) else 0


def inputs_on_host(loading: ModelSettings) -> bool:
    """Return whether the inputs of recomputed layers wait in the host's memory."""
    return loading.gradient_checkpointing and any(each.inputs_on_host for each in loading.preparers)


def engine_of(
    model: Any, settings: EngineSettings, ranks: int, device: PlannedDevice
) -> tuple[dict[str, Any], EngineMemory]:
    """DeepSpeed's configuration for `model`, and what its engine holds."""
    weights, trained = sum(part.numel() for part in model.parameters()), _trained_elements(model)
    sizes = model_sizes(model)
    limits = planned_limits(sizes, settings, ranks, device)
    config = engine_config(settings, ranks, trained, device.is_cuda, limits=limits)
    zero = config["zero_optimization"]
    return config, trained_memory(
        weights,
        trained,
        sizes.module,
        settings.dtype,
        zero=zero,
        ranks=ranks,
        bf16_states=settings.bf16_optimizer_states,
        optimizer=settings.optimizer,
    )


def _trained_elements(model: Any) -> int:
    return sum(part.numel() for part in model.parameters() if part.requires_grad)


def _with_packed_weights(engine: EngineMemory, model: Any) -> tuple[EngineMemory, list[MemoryLine]]:
    """Add the memory of the packed weights of `model`; and, for a forward, of one of them made whole."""
    layers = [layer for _, layer in packed_layers(model)]
    if not layers:
        return engine, []
    held = engine.parameters.device_bytes + sum(part.nbytes for layer in layers for part in layer.buffers())
    largest = max(layer.weight.nbytes for layer in layers)
    parameters = replace(engine.parameters, name=f"weights, layers in {layers[0].form}", device_bytes=held)
    return replace(engine, parameters=parameters), [MemoryLine("one dequantized weight", largest)]


def planned_chunk_mb(model: Any, dtype: str, device: PlannedDevice) -> int:
    """--head_chunk_mb as a run decides it, on a GPU of which nothing is taken yet."""
    if not device.is_cuda or device.memory_bytes is None:
        return CHUNK_MB
    return chunk_mb_for(device.memory_bytes, model.config.get_text_config().vocab_size, DTYPES[dtype])


def planned_limits(sizes: ModelSizes, settings: EngineSettings, ranks: int, device: PlannedDevice) -> dict[str, int]:
    """ZeRO-3's limits of gathering for a model on `ranks` such devices, as `limits_of` sets them on real ones."""
    memory_bytes = device.memory_bytes if device.is_cuda else host_share(ranks)
    return zero3_limits(sizes, DTYPES[settings.dtype].itemsize, memory_bytes, device.is_cuda)


def rows_at_most(
    sequences: int,
    longest_tokens: int,
    packed: bool,
    most_tokens: int | None,
    *,
    shared_by: int = 1,
    keeps_small: bool = False,
) -> int:
    """Return how many rows of `longest_tokens` the largest forward of `sequences` has, as `forward_bound` bounds it.
    A single sequence may exceed the bound of `most_tokens`. shared_by: responses of a prompt, each in a separate row if
    nothing is packed. keeps_small: see `forward_bound`."""
    most = forward_bound(most_tokens, sequences, longest_tokens, packed=packed, keeps_small=keeps_small)
    if most is not None:
        return max(1, -(-most // longest_tokens))
    return sequences * shared_by
