"""Seconds of a rollout with its updates, by parts, for `--dry_run` on a device whose speed is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.clock.rollout import DecodePlan, decode_seconds, sum_seconds
from threestep.plugins.plan.clock.roofline import usual_share, work_seconds
from threestep.plugins.plan.clock.traffic import exposed_gather_seconds, gather_seconds
from threestep.plugins.plan.clock.training_step import Parts, step_parts
from threestep.plugins.plan.clock.work import TrainingWork
from threestep.plugins.plan.dry_run.activations import cache_bytes, decoder_layers
from threestep.plugins.plan.dry_run.clock import clock_device, step_plan
from threestep.plugins.plan.dry_run.engine_memory import ELEMENT_BYTES
from training.utils.models.row_sharing import row_sharing

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.devices import Device
    from threestep.plugins.plan.dry_run.plan import LargestForward
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.rollout_engine import RolloutEngine

_TRAINED = ("actor", "critic")


def rollout_parts(
    flags: PpoFlags,
    roles: dict[str, Any],
    forward: LargestForward,
    count: Callable[..., TrainingWork],
    *,
    ranks: int,
    engine: type[RolloutEngine],
) -> Parts | None:
    """Seconds of one rollout with its updates; None on a device of unknown speed. roles: models on meta that read every
    sequence, or None. count: a model's work. engine: that draws."""
    ppo, name = flags.ppo, flags.added.of(DryRunArguments).device
    device = clock_device(name, flags.roles.dtype, row_sharing(flags.added), settings=flags.settings, ranks=ranks)
    if device is None:
        return None
    forwards = -(-ppo.sequences_per_rollout // forward.rows)
    parts: Parts = _drawing(flags, roles["actor"], device, count, ranks=ranks, engine=engine)
    for role, model in roles.items():
        if model is None:
            continue
        work = _work_of(count, model, forward, flags, share=1.0)
        if not (ppo.reuse_forwards if role == "actor" else role in _TRAINED and ppo.reuse_values):
            computed = _forward_seconds(work, flags.roles.dtype, device)
            waits = _sharded_seconds(flags, role, model, computed, ranks=ranks, device=device)
            parts[f"scores of the {role}"] = forwards * (computed + waits)
        if role in _TRAINED:
            learnt = ppo.sequences_per_minibatch / ppo.sequences_per_rollout
            work = _work_of(count, model, forward, flags, share=min(1.0, learnt))
            settings, steps = flags.roles.engine(role), -(-ppo.sequences_per_minibatch // forward.rows)
            plan = step_plan(model, flags.model(role), settings, ranks=ranks, micro_steps=steps)
            for name, seconds in step_parts(work, plan, device).items():
                parts[f"{role}: {name}"] = ppo.steps_per_rollout * seconds
    if device.measured is not None and device.measured.costs.rollout:
        parts["the rollout itself"] = device.measured.costs.rollout
    return parts


def _work_of(
    count: Callable[..., TrainingWork], model: Any, forward: LargestForward, flags: PpoFlags, *, share: float
) -> TrainingWork:
    """The work of a forward in which responses share their prompts. share: of a rollout's sequences, drawn at random,
    that are laid out together: of n samples of a prompt some are among them with probability 1 - (1 - share)^n."""
    ppo, prompt = flags.ppo, flags.data.rows.max_prompt_seq_len
    samples, rows, answer = ppo.num_samples_per_prompt, forward.rows, flags.longest_tokens - prompt
    if samples == 1 or ppo.padded:
        return count(model, rows, flags.longest_tokens, forward.targets)
    prompts = max(1.0, rows * (1 - (1 - share) ** samples) / (share * samples))
    documents = max(1, round(prompts))
    tokens = round((prompts * prompt + rows * answer) / documents)
    work = count(model, documents, tokens, forward.targets)
    seen = prompts * prompt * (prompt + 1) / 2 + rows * (prompt * answer + answer * (answer + 1) / 2)
    of_all = seen / (documents * tokens * (tokens + 1) / 2)  # as if every token saw all before it in its row
    return TrainingWork(*(replace(part, attention_flops=of_all * part.attention_flops) for part in work))


def _forward_seconds(work: TrainingWork, dtype: str, device: Device) -> float:
    """A forward without a backward; of the head's three products, one."""
    body = work_seconds(work.forward, device, dtype=dtype)
    head = work_seconds(work.head, device, dtype=dtype, head=True)
    launched = 0.0 if device.measured is None else body.launches + head.launches / 3
    return (body.device + head.device / 3) / usual_share(device) + launched


def _sharded_seconds(flags: PpoFlags, role: str, model: Any, computed: float, *, ranks: int, device: Device) -> float:
    """Seconds that a forward of a role waits for its shards with ZeRO-3: the reference's as the actor's, the reward
    model's as the critic's. Offloaded ones first go through the host's link."""
    trained = "actor" if role in ("actor", "reference") else "critic"
    if flags.roles.engine(trained).zero_stage != 3:
        return 0.0
    size = ELEMENT_BYTES[flags.roles.dtype] * sum(part.numel() for part in model.parameters())
    layers = max(1, len(decoder_layers(model.base_model)))
    waits = exposed_gather_seconds(size, ranks, device, layers=layers, computed=computed)
    offloads = role != trained and flags.roles.frozen_engine(trained).offload
    return max(waits, size / ranks / (1e9 * device.links.host) - computed) if offloads else waits


def _drawing(
    flags: PpoFlags,
    actor: Any,
    device: Device,
    count: Callable[..., TrainingWork],
    *,
    ranks: int,
    engine: type[RolloutEngine],
) -> Parts:
    """Seconds of drawing a rollout: the prompts' forward, the steps of decoding, and weights on their way to it."""
    ppo, roles = flags.ppo, flags.roles
    prompts, size = ppo.per_device_generation_batch_size, ELEMENT_BYTES[roles.dtype]
    prompt, answer = flags.data.rows.max_prompt_seq_len, ppo.max_answer_seq_len
    weights = sum(part.numel() for part in actor.parameters())
    read_once = weights - (0 if actor.config.tie_word_embeddings else actor.get_input_embeddings().weight.numel())
    read = count(actor, prompts, prompt, prompts)
    launches = read.forward.launches if engine.launched_by_host else 0
    together = engine.ranks_together(flags.settings_of_engine(engine))
    sequences, config = prompts * ppo.num_samples_per_prompt, actor.config.get_text_config()
    a_token = cache_bytes(config, 1, 1, size) / together
    decoding = DecodePlan(
        read_once / together,
        size,
        a_token,
        sequences * together,
        prompt,
        answer,
        launches,
        products=1 + sum(read.forward.matmuls.values()),  # the output layer's too
        vocabulary=config.vocab_size,
    )
    parts = {
        "prefill": ppo.generation_batches * _forward_seconds(read, roles.dtype, device),
        "decode": ppo.generation_batches * decode_seconds(decoding, device, roles.dtype),
    }
    if together > 1:
        summed = sum_seconds(decoding, config.num_hidden_layers, config.hidden_size, together, device=device)
        parts["all-reduce between ranks that generate together"] = ppo.generation_batches * summed
    if roles.actor_zero_stage == 3 and ranks > 1:
        parts["sending weights to the rollout"] = gather_seconds(size * weights, ranks, device)
    return parts
