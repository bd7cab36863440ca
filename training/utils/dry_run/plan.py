"""What training one model takes of a rank: its engine's memory, and its largest forward and backward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from training.utils.dry_run.activations import head_bytes, saved_activations
from training.utils.dry_run.engine_memory import EngineMemory, trained_memory
from training.utils.dry_run.table import MemoryLine
from training.utils.engine.arguments import EngineSettings
from training.utils.engine.config import deepspeed_config
from training.utils.engine.startup import DTYPES
from training.utils.engine.zero3_limits import host_share, model_sizes, zero3_limits
from training.utils.models.attention import SDPA
from training.utils.models.settings import ModelSettings


@dataclass(frozen=True)
class LargestForward:
    """The most that one forward of a rank may hold: `rows` rows of `tokens` tokens each, with `targets` tokens to
    predict in all. masked: a dense mask says which token sees which."""

    rows: int
    tokens: int
    targets: int
    masked: bool
    with_entropy: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """A model that will be trained. engine: what it holds; forward: what its largest forward and backward add, with
    activations first."""

    sentences: tuple[str, ...]
    engine: EngineMemory
    forward: tuple[MemoryLine, ...]

    @property
    def extra_bytes(self) -> int:
        """On the device, besides what is held: at the peak of a backward or of the optimizer's step."""
        backward = self.engine.buffers.device_bytes + sum(line.device_bytes for line in self.forward)
        return max(backward, self.engine.stepping.device_bytes)


def plan_training(
    model: Any, forward: LargestForward, loading: ModelSettings, settings: EngineSettings, ranks: int
) -> PlannedModel:
    """Return what training `model` (on the meta device) takes of one rank."""
    trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
    weights = sum(part.numel() for part in model.parameters())
    on_gpu, sizes = torch.cuda.is_available(), model_sizes(model)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu else host_share(ranks)
    limits = zero3_limits(sizes, DTYPES[settings.dtype].itemsize, memory_bytes, on_gpu)
    config = deepspeed_config(settings, ranks, trained, on_gpu, limits)
    zero = config["zero_optimization"]
    engine = trained_memory(weights, trained, sizes.module, settings.dtype, zero, ranks)
    saved = saved_activations(model, forward.rows, forward.tokens, loading.attn_implementation)
    recomputed = ", recomputed by layers" if loading.gradient_checkpointing else ""
    lines = [
        MemoryLine(f"activations{recomputed}", saved.held(loading.gradient_checkpointing)),
        MemoryLine("gradients of activations", 3 * saved.widest),
    ]
    if model.get_output_embeddings() is not None:
        positions = forward.rows * forward.tokens
        lines.append(MemoryLine("logits", head_bytes(model, forward.targets, positions, forward.with_entropy)))
    if forward.masked and loading.attn_implementation == SDPA:
        size = DTYPES[settings.dtype].itemsize  # as bool, and as the numbers that the kernel adds to the scores
        lines.append(MemoryLine("attention mask", forward.rows * forward.tokens**2 * (1 + size)))
    adapters = f", LoRA of rank {loading.lora_dim}" if loading.lora_dim else ""
    sentences = (
        f"model: {type(model).__name__}, {weights:,} weights, of which {trained:,} train{adapters}; "
        f"{settings.dtype}, attention {loading.attn_implementation}, gradient checkpointing "
        f"{'on' if loading.gradient_checkpointing else 'off'}",
        f"DeepSpeed: {json.dumps(config)}",
    )
    return PlannedModel(sentences, engine, tuple(lines))


def rows_at_most(sequences: int, longest_tokens: int, packed: bool, most_tokens: int | None, shared_by: int = 1) -> int:
    """Return how many rows of `longest_tokens` the largest forward of `sequences` has, as `forward_plan` bounds it.
    A single sequence may exceed the bound of `most_tokens`. shared_by: responses of a prompt, each in a row of its own
    if nothing is packed."""
    if most_tokens is not None:
        return max(1, -(-most_tokens // longest_tokens))
    return sequences if packed else sequences * shared_by
