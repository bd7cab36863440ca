"""`--dry_run` of the steps that train one model: build it without weights, plan its batches, estimate its memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from training.utils.engine.arguments import EngineArguments
from training.utils.engine.config import deepspeed_config
from training.utils.engine.memory import EngineMemory, MemoryLine, trained_memory
from training.utils.engine.settings import EngineSettings
from training.utils.engine.startup import DTYPES
from training.utils.layout.planner import PlanSettings, forward_plan
from training.utils.models.arguments import ModelArguments
from training.utils.models.attention import SDPA, long_rows_are_free
from training.utils.models.loading import check_positions
from training.utils.models.memory import head_bytes, saved_activations
from training.utils.models.meta import causal_lm_on_meta, scalar_model_on_meta
from training.utils.models.settings import ModelSettings
from training.utils.run.arguments import resolved_settings
from training.utils.run.dry_run import ranks_of_dry_run, say_memory, say_plan
from training.utils.run.run_arguments import RunArguments

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class PlannedModel:
    """A model that is to be trained. engine: what it holds; forward: what its largest forward and backward add,
    activations first."""

    sentences: tuple[str, ...]
    engine: EngineMemory
    forward: tuple[MemoryLine, ...]

    @property
    def backward_bytes(self) -> int:
        """On the device, at the height of a backward, beside what is held."""
        return self.engine.buffers.device_bytes + sum(line.device_bytes for line in self.forward)

    @property
    def extra_bytes(self) -> int:
        """The same, of whatever takes more: a backward, or the optimizer's step."""
        return max(self.backward_bytes, self.engine.stepping.device_bytes)


@dataclass(frozen=True)
class LargestForward:
    """rows of tokens tokens each, of which `targets` in all are predicted; sharing: a dense mask says who sees whom."""

    rows: int
    tokens: int
    targets: int
    masked: bool
    with_entropy: bool = False


def plan_training(
    model: Any, forward: LargestForward, loading: ModelSettings, settings: EngineSettings, ranks: int
) -> PlannedModel:
    """Return what training `model` (on the meta device) takes of one rank."""
    trainable = [part.numel() for part in model.parameters() if part.requires_grad]
    weights = sum(part.numel() for part in model.parameters())
    config = deepspeed_config(settings, ranks, sum(trainable), torch.cuda.is_available())
    zero = config["zero_optimization"]
    held = trained_memory(weights, trainable, largest_module(model), settings.dtype, zero, ranks)
    kept = saved_activations(model, forward.rows, forward.tokens, loading.attn_implementation)
    lines = [
        MemoryLine(
            "activations" + (", recomputed by layers" if loading.gradient_checkpointing else ""),
            kept.kept(loading.gradient_checkpointing),
        ),
        MemoryLine("gradients of activations", 3 * kept.widest),
    ]
    if model.get_output_embeddings() is not None:
        positions = forward.rows * forward.tokens
        most = head_bytes(model, forward.targets, positions, forward.with_entropy)
        lines.append(MemoryLine("logits", most))
    if forward.masked and loading.attn_implementation == SDPA:
        size = DTYPES[settings.dtype].itemsize  # as bool, and as what the kernel adds to the scores
        lines.append(MemoryLine("attention mask", forward.rows * forward.tokens**2 * (1 + size)))
    adapters = f", LoRA of rank {loading.lora_dim}" if loading.lora_dim else ""
    sentences = (
        f"model: {type(model).__name__}, {weights:,} weights, of which {sum(trainable):,} train{adapters}; "
        f"{settings.dtype}, attention {loading.attn_implementation}, gradient checkpointing "
        f"{'on' if loading.gradient_checkpointing else 'off'}",
        f"DeepSpeed: {json.dumps(config)}",
    )
    return PlannedModel(sentences, held, tuple(lines))


def largest_forward(plan: PlanSettings, sequences: int, longest_tokens: int, shared_by: int = 1) -> tuple[int, int]:
    """Return (rows, tokens of a row) of the most that a forward may hold; one sequence may be longer than a bound.
    shared_by: responses of a prompt, each a row of its own where nothing is packed."""
    budget = plan.max_tokens_per_micro_batch
    if budget is None:
        return sequences * shared_by, longest_tokens
    return max(1, -(-budget // longest_tokens)), longest_tokens


def dry_run(
    program: str,
    groups: Sequence[Any],
    learning_rate: float,
    max_seq_len: int,
    scalar: bool = False,
    responses: int = 1,
) -> None:
    """Say what the run of a step with one model would be. groups: its parsed arguments; scalar: a reward model;
    responses: of one prompt, 2 for pairs."""
    run, engine = of_kind(groups, RunArguments), of_kind(groups, EngineArguments)
    model = of_kind(groups, ModelArguments)
    ranks = ranks_of_dry_run(run.num_ranks)
    settings, loading = engine.settings(learning_rate), model.settings()
    check_positions(loading, max_seq_len, "--max_seq_len")
    built = (scalar_model_on_meta if scalar else causal_lm_on_meta)(loading, DTYPES[settings.dtype])
    sequences = engine.per_device_train_batch_size
    plan = forward_plan(
        sequences,
        max_seq_len,
        built.config.get_text_config().hidden_size,
        not engine.padded,
        ranks,
        engine.max_tokens_per_micro_batch,
        long_rows_are_free(loading.attn_implementation),
    )
    rows, tokens = largest_forward(plan, sequences, max_seq_len, responses)
    forward = LargestForward(rows, tokens, rows * tokens, masked=not engine.padded)
    planned = plan_training(built, forward, loading, settings, ranks)
    a_step = sequences * ranks * engine.gradient_accumulation_steps
    sentences = [
        *planned.sentences,
        f"batches: an optimizer step takes {a_step} {'prompts' if responses > 1 else 'sequences'} "
        f"({sequences} x {ranks} ranks x {engine.gradient_accumulation_steps}); a forward of one rank holds at most "
        f"{rows * tokens:,} tokens in {'packed' if not engine.padded else 'padded'} rows of at most {tokens:,}",
    ]
    say_plan(program, ranks, resolved_settings(groups), sentences)
    held = planned.engine.held
    say_memory(
        [*held, planned.engine.buffers, *planned.forward, planned.engine.stepping], [peak(held, planned.extra_bytes)]
    )


def of_kind(groups: Sequence[Any], kind: type[_Group]) -> _Group:
    """The group of arguments that is one of `kind`."""
    return next(group for group in groups if isinstance(group, kind))


def peak(held: Sequence[MemoryLine], extra_bytes: int, what: str = "most at once") -> MemoryLine:
    """What is held, and what is added at the worst moment."""
    device = sum(line.device_bytes for line in held) + extra_bytes
    return MemoryLine(what, device, sum(line.host_bytes for line in held))


def largest_module(model: Any) -> int:
    """Elements of the module that has most parameters of its own: what ZeRO-3 has to gather at once."""
    return max(sum(part.numel() for part in module.parameters(recurse=False)) for module in model.modules())
