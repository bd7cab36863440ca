"""`--dry_run` of step 3: every role without weights, the plan of rollouts and updates, and the memory of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from training.step3_ppo.arguments import PpoArguments, RolesArguments
from training.step3_ppo.assembly import Names, check_lengths
from training.step3_ppo.kl import WHOLE_KL_ESTIMATORS
from training.utils.data.arguments import DataArguments
from training.utils.engine.config import deepspeed_config
from training.utils.engine.dry_run import (
    LargestForward,
    PlannedModel,
    largest_forward,
    largest_module,
    of_kind,
    peak,
    plan_training,
)
from training.utils.engine.memory import ELEMENT_BYTES, MemoryLine, frozen_memory
from training.utils.engine.settings import EngineSettings
from training.utils.engine.startup import DTYPES
from training.utils.layout.planner import forward_plan
from training.utils.models.memory import cache_bytes
from training.utils.models.meta import causal_lm_on_meta, scalar_model_on_meta
from training.utils.models.settings import ModelSettings
from training.utils.run.arguments import resolved_settings
from training.utils.run.dry_run import ranks_of_dry_run, say_memory, say_plan
from training.utils.run.run_arguments import RunArguments

_DRAWING_COPIES = 4  # of a step's logits in float32: themselves, their exponentials, and what a cut makes of them


def dry_run(groups: Sequence[Any], names: Names) -> None:
    """Say what a run of step 3 would be. groups: its parsed arguments; names: what `checked_names` found in them."""
    run, data = of_kind(groups, RunArguments), of_kind(groups, DataArguments)
    roles, ppo = of_kind(groups, RolesArguments), of_kind(groups, PpoArguments)
    ranks = ranks_of_dry_run(run.num_ranks)
    dtype = DTYPES[roles.dtype]
    longest = data.max_prompt_seq_len + ppo.max_answer_seq_len
    check_lengths(roles, data, ppo, names.with_critic_tokenizer)
    actor = causal_lm_on_meta(roles.actor_model(), dtype)
    critic = scalar_model_on_meta(roles.critic_model(), dtype) if names.algorithm.estimator.needs_critic else None
    scorer = scalar_model_on_meta(roles.critic_model().as_it_is(), dtype) if names.with_reward_model else None

    forward = _forward(actor, ppo, names, longest, ranks)
    planned_actor = _trained("actor", actor, forward, roles.actor_model(), roles.actor_engine(), ranks)
    trained = {"actor": replace(planned_actor, forward=(*planned_actor.forward, *_whole_logits(actor, forward, names)))}
    if critic is not None:
        scalar_forward = replace(forward, with_entropy=False)
        trained["critic"] = _trained(
            "critic", critic, scalar_forward, roles.critic_model(), roles.critic_engine(), ranks
        )
    held = [line for planned in trained.values() for line in planned.engine.held]
    held += _frozen(actor, scorer, roles, names, ranks)

    rollout = _rollout(actor, roles, ppo, longest)
    kept = _kept(trained, ppo, forward)
    learning = [
        line
        for planned in trained.values()
        for line in (planned.engine.buffers, *planned.forward, planned.engine.stepping)
    ]
    sentences = [f"{role}: {sentence}" for role, planned in trained.items() for sentence in planned.sentences]
    say_plan(
        "training.step3_ppo.main",
        ranks,
        resolved_settings(groups),
        [*sentences, *_batches(ppo, forward, longest, ranks)],
    )
    say_memory(
        [*held, *rollout, *learning, *kept],
        [
            peak(held, sum(line.device_bytes for line in rollout), "most at once, rolling out"),
            peak(
                held,
                max(planned.extra_bytes for planned in trained.values()) + sum(line.device_bytes for line in kept),
                "most at once, learning",
            ),
        ],
    )


def _kept(trained: dict[str, PlannedModel], ppo: PpoArguments, forward: LargestForward) -> list[MemoryLine]:
    """What --reuse_forwards keeps beside the forward that is learned from."""
    if not ppo.reuse_forwards:
        return []
    forwards = -(-ppo.sequences_per_minibatch // forward.rows)
    activations = [planned.forward[0].device_bytes for planned in trained.values()]
    return [MemoryLine("further activations, kept", forwards * sum(activations) - max(activations))]


def _whole_logits(actor: Any, forward: LargestForward, names: Names) -> list[MemoryLine]:
    """The exact KL holds the float32 logits of both models (`kl.WHOLE_KL_ESTIMATORS`)."""
    algorithm = names.algorithm
    if not (algorithm.wants_reference and algorithm.flags.kl_estimator in WHOLE_KL_ESTIMATORS):
        return []
    vocabulary = actor.config.get_text_config().vocab_size
    return [MemoryLine("actor: logits of two models for the exact KL", 2 * 4 * forward.targets * vocabulary)]


def _forward(actor: Any, ppo: PpoArguments, names: Names, longest: int, ranks: int) -> LargestForward:
    """A sequence is a prompt and a response; only responses are predicted."""
    sequences = ppo.per_device_training_batch_size
    hidden = actor.config.get_text_config().hidden_size
    plan = forward_plan(sequences, longest, hidden, not ppo.padded, ranks, ppo.max_tokens_per_micro_batch)
    rows, tokens = largest_forward(plan, sequences, longest)
    with_entropy = names.algorithm.flags.entropy_coef > 0
    return LargestForward(rows, tokens, rows * ppo.max_answer_seq_len, masked=not ppo.padded, with_entropy=with_entropy)


def _trained(
    role: str, model: Any, forward: LargestForward, loading: ModelSettings, settings: EngineSettings, ranks: int
) -> PlannedModel:
    planned = plan_training(model, forward, loading, settings, ranks)
    named = tuple(replace(line, what=f"{role}: {line.what}") for line in planned.forward)
    return replace(planned, engine=planned.engine.named(role), forward=named)


def _frozen(actor: Any, scorer: Any, roles: RolesArguments, names: Names, ranks: int) -> list[MemoryLine]:
    """Reference, reward model and moving average, where there are these."""
    on_gpu = torch.cuda.is_available()
    lines = []
    adapter_is_all = roles.actor_lora_dim > 0 and roles.only_optimize_lora
    if names.algorithm.wants_reference and not adapter_is_all:
        engine = replace(roles.actor_engine(), offload=roles.offload or roles.offload_reference_model)
        lines.append(_read("reference", _plain_elements(actor), largest_module(actor), engine, ranks, on_gpu))
    if scorer is not None:
        engine = replace(roles.critic_engine(), offload=roles.offload or roles.offload_reward_model)
        lines.append(_read("reward model", _plain_elements(scorer), largest_module(scorer), engine, ranks, on_gpu))
    if roles.enable_ema:
        trained = sum(part.numel() for part in actor.parameters() if part.requires_grad)
        lines.append(MemoryLine("moving average", 4 * -(-trained // ranks)))
    return lines


def _read(role: str, weights: int, largest: int, engine: EngineSettings, ranks: int, on_gpu: bool) -> MemoryLine:
    zero = (
        dict(deepspeed_config(engine, ranks, 1, on_gpu)["zero_optimization"])
        if engine.zero_stage == 3
        else {"stage": 0}
    )
    line, _ = frozen_memory(weights, largest, engine.dtype, zero, ranks)
    return replace(line, what=f"{role}: {line.what}")


def _plain_elements(model: Any) -> int:
    """Without adapters."""
    return sum(part.numel() for name, part in model.named_parameters() if ".lora_" not in name)


def _rollout(actor: Any, roles: RolesArguments, ppo: PpoArguments, longest: int) -> list[MemoryLine]:
    """What drawing responses adds; a rollout's rows all live at its start."""
    size = ELEMENT_BYTES[roles.dtype]
    sequences = ppo.per_device_generation_batch_size * ppo.num_samples_per_prompt
    config = actor.config.get_text_config()
    lines = [
        MemoryLine(f"rollout: key-value cache, {sequences} x {longest}", cache_bytes(config, sequences, longest, size)),
        MemoryLine("rollout: logits of a token", sequences * config.vocab_size * (size + 4 * _DRAWING_COPIES)),
    ]
    if roles.actor_zero_stage == 3:
        lines.append(MemoryLine("rollout: the actor's weights, whole", size * _plain_elements(actor)))
    return lines


def _batches(ppo: PpoArguments, forward: LargestForward, longest: int, ranks: int) -> list[str]:
    rolled_out, minibatch = ppo.sequences_per_rollout, ppo.sequences_per_minibatch
    return [
        f"batches: a rank draws {ppo.num_samples_per_prompt} x {ppo.per_device_generation_batch_size} responses at a "
        f"time and {rolled_out} ({rolled_out * ranks} on all ranks) between two updates; an optimizer step takes "
        f"{minibatch * ranks} of them, {rolled_out // minibatch * ppo.ppo_epochs} steps a rollout; a forward of one "
        f"rank holds at most {forward.rows * forward.tokens:,} tokens, sequences at most {longest:,}",
    ]
