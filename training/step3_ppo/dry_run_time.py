"""Seconds of a rollout with its updates, by parts, for `--dry_run` on a device whose speed is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.clock.rollout import DecodePlan, decode_seconds
from training.utils.clock.roofline import RUNNING_SHARE, work_seconds
from training.utils.clock.traffic import gather_seconds
from training.utils.clock.training_step import Parts, step_parts
from training.utils.dry_run.activations import cache_bytes
from training.utils.dry_run.clock import clock_device, print_time, step_plan
from training.utils.dry_run.engine_memory import ELEMENT_BYTES
from training.utils.dry_run.operators import training_work

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.clock.devices import Device
    from training.utils.clock.work import TrainingWork
    from training.utils.dry_run.plan import LargestForward

_BY_THE_HOST = ("hf", "hybrid")  # rollout engines whose operators the host launches one by one
_TRAINED = ("actor", "critic")


def print_rollout_time(flags: PpoFlags, roles: dict[str, Any], forward: LargestForward, *, ranks: int) -> None:
    """Print what one rollout with its updates takes. roles: models on meta that read every sequence, or None."""
    ppo, device = flags.ppo, clock_device(flags.run.device, flags.roles.dtype, flags.ppo.sequence_parallel_size)
    if device is None:
        return
    forwards = -(-ppo.sequences_per_rollout // ppo.per_device_training_batch_size)
    parts: Parts = _drawing(flags, roles["actor"], device, ranks)
    for role, model in roles.items():
        if model is None:
            continue
        work = training_work(model, forward.rows, flags.longest_tokens, forward.targets)
        if not (ppo.reuse_forwards and role in _TRAINED):
            parts[f"scores of the {role}"] = forwards * _forward_seconds(work, flags.roles.dtype, device)
        if role in _TRAINED:
            settings, steps = flags.roles.engine(role), ppo.gradient_accumulation_steps
            plan = step_plan(model, flags.roles.model(role), settings, ranks=ranks, micro_steps=steps)
            for name, seconds in step_parts(work, plan, device).items():
                parts[f"{role}: {name}"] = ppo.steps_per_rollout * seconds
    print_time(parts, flags.run, ranks, steps=ppo.max_train_steps, unit="rollout")


def _forward_seconds(work: TrainingWork, dtype: str, device: Device) -> float:
    """A forward without a backward; of the head's three products, one."""
    body, head = (work_seconds(part, device, dtype=dtype).device for part in (work.forward, work.head))
    return (body + head / 3) / RUNNING_SHARE


def _drawing(flags: PpoFlags, actor: Any, device: Device, ranks: int) -> Parts:
    """Seconds of drawing a rollout: the prompts' forward, the steps of decoding, and weights on their way to it."""
    ppo, roles = flags.ppo, flags.roles
    prompts, size = ppo.per_device_generation_batch_size, ELEMENT_BYTES[roles.dtype]
    prompt, answer = flags.data.rows.max_prompt_seq_len, ppo.max_answer_seq_len
    weights = sum(part.numel() for part in actor.parameters())
    read = training_work(actor, prompts, prompt, prompts)
    launches = read.forward.launches if ppo.rollout_engine in _BY_THE_HOST else 0
    sequences = prompts * ppo.num_samples_per_prompt
    a_token = cache_bytes(actor.config.get_text_config(), 1, 1, size)
    decoding = DecodePlan(weights, size, a_token, sequences, prompt, answer, launches)
    parts = {
        "prefill": ppo.generation_batches * _forward_seconds(read, roles.dtype, device),
        "decode": ppo.generation_batches * decode_seconds(decoding, device, roles.dtype),
    }
    if roles.actor_zero_stage == 3 and ranks > 1:
        parts["weights to the rollout"] = gather_seconds(size * weights, ranks, device)
    return parts
