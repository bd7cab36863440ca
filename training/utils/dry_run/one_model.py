"""`--dry_run` of the steps that train one model: build it without weights, plan its batches, estimate its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.dry_run.meta import causal_lm_on_meta, scalar_model_on_meta
from training.utils.dry_run.plan import LargestForward, largest_forward, plan_training
from training.utils.dry_run.table import peak, print_memory, print_plan, ranks_of_dry_run
from training.utils.engine.arguments import EngineArguments
from training.utils.engine.startup import DTYPES
from training.utils.layout.planner import forward_plan
from training.utils.loading.configurations import check_positions
from training.utils.models.arguments import ModelArguments
from training.utils.models.attention import long_rows_are_free
from training.utils.run.arguments import group_of, resolved_settings
from training.utils.run.run_arguments import RunArguments


def dry_run(
    program: str,
    groups: Sequence[Any],
    learning_rate: float,
    max_seq_len: int,
    scalar: bool = False,
    responses: int = 1,
) -> None:
    """Print what a step's run would be. groups: its parsed arguments; responses: of one prompt, 2 for pairs."""
    engine, model = group_of(groups, EngineArguments), group_of(groups, ModelArguments).settings()
    ranks = ranks_of_dry_run(group_of(groups, RunArguments).num_ranks)
    settings = engine.settings(learning_rate)
    check_positions(model, max_seq_len, "--max_seq_len")
    built = (scalar_model_on_meta if scalar else causal_lm_on_meta)(model, DTYPES[settings.dtype])
    sequences = engine.per_device_train_batch_size
    plan = forward_plan(
        sequences,
        max_seq_len,
        built.config.get_text_config().hidden_size,
        not engine.padded,
        ranks,
        engine.max_tokens_per_micro_batch,
        long_rows_are_free(model.attn_implementation),
    )
    rows, tokens = largest_forward(plan, sequences, max_seq_len, responses)
    forward = LargestForward(rows, tokens, rows * tokens, masked=not engine.padded)
    planned = plan_training(built, forward, model, settings, ranks)
    sequences_per_step = sequences * ranks * engine.gradient_accumulation_steps
    batches = (
        f"batches: an optimizer step takes {sequences_per_step} {'prompts' if responses > 1 else 'sequences'} "
        f"({sequences} x {ranks} ranks x {engine.gradient_accumulation_steps}); a forward of one rank holds at most "
        f"{rows * tokens:,} tokens in {'padded' if engine.padded else 'packed'} rows of at most {tokens:,}"
    )
    print_plan(program, ranks, resolved_settings(groups), [*planned.sentences, batches])
    held = planned.engine.held
    print_memory(
        [*held, planned.engine.buffers, *planned.forward, planned.engine.stepping], [peak(held, planned.extra_bytes)]
    )
