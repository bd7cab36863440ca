"""`--dry_run` of step 3: every role without weights, the plan of rollouts and updates, and the memory of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from training.step3_ppo.arguments import PpoArguments
from training.step3_ppo.checks import Components, check_lengths
from training.step3_ppo.flags import PpoFlags
from training.step3_ppo.roles_arguments import RolesArguments
from training.utils.dry_run.activations import cache_bytes
from training.utils.dry_run.engine_memory import ELEMENT_BYTES, weights_memory
from training.utils.dry_run.meta import model_on_meta
from training.utils.dry_run.plan import LargestForward, PlannedModel, plan_training, rows_at_most
from training.utils.dry_run.table import MemoryLine, peak, print_memory, print_plan, ranks_of_dry_run
from training.utils.engine.config import deepspeed_config
from training.utils.engine.startup import DTYPES
from training.utils.run.arguments import resolved_settings

_DRAWING_COPIES = 4  # of a step's logits in float32: themselves, their exponentials, and copies of a cut


def dry_run(flags: PpoFlags, components: Components) -> None:
    """Print what a run of step 3 would be."""
    roles, ppo, longest = flags.roles, flags.ppo, flags.longest_tokens
    ranks = ranks_of_dry_run(flags.run.num_ranks)
    dtype = DTYPES[roles.dtype]
    check_lengths(flags, components.with_critic_tokenizer)
    actor = model_on_meta(roles.model("actor"), dtype)
    needs_critic = components.algorithm.estimator.needs_critic
    critic = model_on_meta(roles.model("critic"), dtype, scores=True) if needs_critic else None
    frozen = roles.model("critic").as_it_is()
    scorer = model_on_meta(frozen, dtype, scores=True) if components.with_reward_model else None

    forward = _forward(ppo, components, longest)
    whole_logits = _whole_logits(actor, forward, components)
    trained = {"actor": _trained("actor", actor, forward, roles, ranks, *whole_logits)}
    if critic is not None:
        trained["critic"] = _trained("critic", critic, replace(forward, with_entropy=False), roles, ranks)
    held = [line for planned in trained.values() for line in planned.engine.held]
    held += _frozen(actor, scorer, roles, components, ranks)

    rollout = _rollout(actor, roles, ppo, longest)
    reused = _reused(trained, ppo, forward)
    learning: list[MemoryLine] = []
    for planned in trained.values():
        learning += [planned.engine.buffers, *planned.forward, planned.engine.stepping]
    sentences = [f"{role}: {sentence}" for role, planned in trained.items() for sentence in planned.sentences]
    sentences.append(_batches(ppo, forward, longest, ranks))
    print_plan("training.step3_ppo.main", ranks, resolved_settings(flags), sentences)
    rolling_out = sum(line.device_bytes for line in rollout)
    largest_update = max(planned.extra_bytes for planned in trained.values())
    updating = largest_update + sum(line.device_bytes for line in reused)
    peaks = [peak(held, rolling_out, "most at once, rolling out"), peak(held, updating, "most at once, learning")]
    print_memory([*held, *rollout, *learning, *reused], peaks)


def _reused(trained: dict[str, PlannedModel], ppo: PpoArguments, forward: LargestForward) -> list[MemoryLine]:
    """What --reuse_forwards holds besides the forward that learns."""
    if not ppo.reuse_forwards:
        return []
    forwards = -(-ppo.sequences_per_minibatch // forward.rows)
    activations = [planned.forward[0].device_bytes for planned in trained.values()]
    return [MemoryLine("further activations, kept", forwards * sum(activations) - max(activations))]


def _whole_logits(actor: Any, forward: LargestForward, components: Components) -> list[MemoryLine]:
    """The exact KL holds the float32 logits of both models (`--kl_estimator full`)."""
    algorithm = components.algorithm
    if not (algorithm.wants_reference and algorithm.kl_estimator.of_logits):
        return []
    vocabulary = actor.config.get_text_config().vocab_size
    return [MemoryLine("actor: logits of two models for the exact KL", 2 * 4 * forward.targets * vocabulary)]


def _forward(ppo: PpoArguments, components: Components, longest: int) -> LargestForward:
    """A sequence is a prompt and a response; only responses are predicted."""
    sequences = ppo.per_device_training_batch_size
    rows = rows_at_most(sequences, longest, not ppo.padded, ppo.max_tokens_per_micro_batch)
    with_entropy = components.algorithm.flags.entropy_coef > 0
    targets = rows * ppo.max_answer_seq_len
    return LargestForward(rows, longest, targets, masked=not ppo.padded, with_entropy=with_entropy)


def _trained(
    role: str, model: Any, forward: LargestForward, roles: RolesArguments, ranks: int, *further: MemoryLine
) -> PlannedModel:
    planned = plan_training(model, forward, roles.model(role), roles.engine(role), ranks)
    named = [replace(line, name=f"{role}: {line.name}") for line in planned.forward]
    return replace(planned, engine=planned.engine.named(role), forward=(*named, *further))


def _frozen(actor: Any, scorer: Any, roles: RolesArguments, components: Components, ranks: int) -> list[MemoryLine]:
    """Reference, reward model and moving average, if any."""
    frozen, lines = [], []
    adapter_is_all = roles.actor_lora_dim > 0 and roles.only_optimize_lora
    if components.algorithm.wants_reference and not adapter_is_all:
        frozen.append(("reference", actor, roles.frozen_engine("actor")))
    if scorer is not None:
        frozen.append(("reward model", scorer, roles.frozen_engine("critic")))
    for name, model, engine in frozen:
        zero = {"stage": 0}
        if engine.zero_stage == 3:
            zero = deepspeed_config(engine, ranks, 1, torch.cuda.is_available())["zero_optimization"]
        line = weights_memory(_plain_elements(model), engine.dtype, zero, ranks)
        lines.append(replace(line, name=f"{name}: {line.name}"))
    if roles.enable_ema:
        trained = sum(part.numel() for part in actor.parameters() if part.requires_grad)
        lines.append(MemoryLine("moving average", 4 * -(-trained // ranks)))
    return lines


def _plain_elements(model: Any) -> int:
    """Count weights without adapters."""
    return sum(part.numel() for name, part in model.named_parameters() if ".lora_" not in name)


def _rollout(actor: Any, roles: RolesArguments, ppo: PpoArguments, longest: int) -> list[MemoryLine]:
    """What drawing responses adds; at its start all rows of a rollout are alive."""
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


def _batches(ppo: PpoArguments, forward: LargestForward, longest: int, ranks: int) -> str:
    rolled_out, minibatch = ppo.sequences_per_rollout, ppo.sequences_per_minibatch
    return (
        f"batches: a rank draws {ppo.num_samples_per_prompt} x {ppo.per_device_generation_batch_size} responses at a "
        f"time and {rolled_out} ({rolled_out * ranks} on all ranks) between two updates; an optimizer step takes "
        f"{minibatch * ranks} of them, {rolled_out // minibatch * ppo.ppo_epochs} steps a rollout; a forward of one "
        f"rank holds at most {forward.rows * forward.tokens:,} tokens, sequences at most {longest:,}"
    )
