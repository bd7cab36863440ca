"""The record of an optimizer step of step 3: the rollout of this rank, and the minibatch.

R drawn tokens, M those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.audit.recording.content import (
    RecordContent,
    StepKind,
    StepNumbers,
    Watched,
    joined,
    of_sequences,
    of_targets,
    spread,
    step_figures,
)
from threestep.plugins.audit.recording.files import RecordHead
from threestep.plugins.audit.recording.hashes import mixed
from threestep.plugins.mismatch.correction import MismatchCorrection
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.experience.sequences import TokenColumns, counted_by_the_actor
from training.step3_ppo.kl import KL_ESTIMATORS
from training.step3_ppo.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from threestep.plugins.mismatch.settings import MismatchSettings
    from training.step3_ppo.contracts.settings import ExperienceSettings, LearningSettings
    from training.step3_ppo.learning.notes import LearntRollout, PolicyStep

_REDUCTIONS = {
    "token-mean": "token mean",
    "seq-mean-token-mean": "sequence mean",
    "seq-mean-token-sum": "sequence sum",
    "seq-mean-token-sum-norm": "sequence sum norm",
}
_K3_BOUND = 10.0  # of `kl.estimators`
# Of a log-probability in float32, as a share of 1 + its size, between packed and padded rows: 10 units at most of
# 8,877, and 38 with logits four times as wide.
_ROUNDING = 34 * torch.finfo(torch.float32).eps


def policy_record(step: PolicyStep, watched: Watched) -> RecordContent:
    """The record of a step."""
    settings, learning, figures = step.settings.experience, step.settings.updates.learning, step.figures
    tensors = {**_rollout(step), **_minibatch(step, watched), **_drawn(step, watched)}
    tokens, sequences = counted_by_the_actor([each for each in step.minibatch.sequences if each.counts])
    per_token = learning.aggregation == "token-mean"
    own = {"denominator": tokens if per_token else sequences, **step_figures("actor", figures)}
    names = {"policy_loss": "actor/policy_loss", "kl_loss": "actor/kl_loss", "value_loss": "critic/value_loss"}
    names |= {f"critic_{name}": f"critic/{name}" for name in ("grad_norm", "learning_rate")}
    own |= {name: figures[source] for name, source in names.items() if source in figures}
    given = _settings(settings, learning, step.kl_coef, tensors)
    head = RecordHead("policy", step.number, settings=given, figures=own)
    return RecordContent(head, tensors, {"other_terms": any(batch.learns for batch in step.beside)})


def _numbers(step: PolicyStep, is_main: bool) -> StepNumbers:
    """The numbers of a minibatch for its digest. The first of a rollout has this rank's prompts and the rollout too."""
    is_first = step.update == 1

    def tensors() -> dict[str, torch.Tensor]:
        numbers = [number for forward in step.forwards for number in forward.numbers]
        found = {"minibatch": torch.tensor(numbers, dtype=torch.int64)}
        return {**_rollout_numbers(step.rollout), **found} if is_first else found

    return StepNumbers([row.row_id for row in step.rollout.rows] if is_first else (), step.figures, tensors)


def _rollout_numbers(recorded: LearntRollout) -> dict[str, torch.Tensor]:
    """The rollout of this rank: a number of each token of the samples, and the floats of all tokens, in any order."""
    experiences, first, found = recorded.experiences, 0, dict[str, torch.Tensor]()
    samples = []
    for each in experiences:
        ids_BR, lengths_B = each.rollout.response_ids_BR, each.rollout.response_lengths_B
        own = [sequence.number for sequence in recorded.own[first : first + len(ids_BR)]]
        first += len(ids_BR)
        place_R = torch.arange(ids_BR.shape[1], device=ids_BR.device)
        place_BR = place_R + (torch.tensor(own, device=ids_BR.device) << 32).unsqueeze(1)
        samples.append((mixed(place_BR) + ids_BR)[place_R < lengths_B.unsqueeze(1)])
    found["rollout/samples"] = torch.cat(samples)
    parts: dict[str, list[torch.Tensor | None]] = {
        "sampling_logprobs": [each.rollout.drawn.logprobs_BR for each in experiences],
        "old_logprobs": [each.old_logprobs_BR for each in experiences],
        "ref_logprobs": [each.read.ref_logprobs_BR for each in experiences],
        "values": [each.read.values_BR for each in experiences],
        "rewards": [each.rewards_BR for each in experiences],
        "advantages": [each.advantages_BR for each in experiences],
        "returns": [each.returns_BR for each in experiences],
    }
    for name, values in parts.items():
        known = [
            part[each.rollout.drawn.mask_BR] for part, each in zip(values, experiences, strict=True) if part is not None
        ]
        if len(known) == len(experiences):
            found[f"rollout/{name}"] = torch.cat(known)
    return {**found, "rollout/scores": torch.cat([each.scored.outcomes_B for each in experiences])}


def _rollout(step: PolicyStep) -> dict[str, torch.Tensor]:
    """The rollout of this rank."""
    experiences, tensors = step.rollout.experiences, dict[str, torch.Tensor]()
    masks = [each.rollout.drawn.mask_BR for each in experiences]

    def put(name: str, parts: Sequence[torch.Tensor | None]) -> None:
        """Add values [B, R] of every experience, if all have them."""
        if all(part is not None for part in parts):
            own = [part[mask] for part, mask in zip(parts, masks, strict=True)]  # type: ignore[index]
            tensors[f"rollout_{name}"] = joined(own, torch.float32)

    put("sampling_logprobs", [each.rollout.drawn.logprobs_BR for each in experiences])
    put("old_logprobs", [each.old_logprobs_BR for each in experiences])
    put("ref_logprobs", [each.read.ref_logprobs_BR for each in experiences])
    put("values", [each.read.values_BR for each in experiences])
    put("corrections", [each.corrected.weights_BR for each in experiences])
    if all(each.read.collisions_BR is not None for each in experiences):
        put("collisions", [each.read.collisions_BR for each in experiences])
        put("policy_logprobs", [each.read.logprobs_BR for each in experiences])
    put("rewards", [each.rewards_BR for each in experiences])
    put("advantages", [each.advantages_BR for each in experiences])
    put("returns", [each.returns_BR for each in experiences])
    greedy = [each.read.greedy_scores_B for each in experiences if each.read.greedy_scores_B is not None]
    if len(greedy) == len(experiences):
        tensors["rollout_greedy_scores"] = joined(greedy, torch.float32)
    if all(each.rollout.drawn.turn_rewards_BR is None for each in experiences):
        tensors["rollout_scores"] = joined([each.scored.outcomes_B for each in experiences], torch.float32)
    numbers = torch.tensor([each.number for each in step.rollout.own], dtype=torch.int64)
    sizes = [len(each.counts_B) for each in experiences]
    return {
        **tensors,
        "rollout_numbers": numbers,
        "rollout_groups": numbers // step.settings.experience.samples_per_prompt,
        "rollout_batches": torch.arange(len(experiences)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64)),
        "rollout_lengths": joined([each.rollout.drawn.lengths_B for each in experiences], torch.int64),
        "rollout_counts": joined([each.counts_B for each in experiences], torch.bool),
        "rollout_ended": joined([each.rollout.ended_B for each in experiences], torch.bool),
    }


def _minibatch(step: PolicyStep, watched: Watched) -> dict[str, torch.Tensor]:
    """The minibatch as this rank's losses were given it."""
    first = next(iter(watched.values()))
    by_number = {each.number: each for each in step.minibatch.sequences}
    devices = [each.loss.device for each in first]
    columns = [
        TokenColumns([by_number[number] for number in forward.numbers], device)
        for forward, device in zip(step.forwards, devices, strict=True)
    ]
    numbers = [number for forward in step.forwards for number in forward.numbers]
    tensors = {**of_sequences(first), "numbers": torch.tensor(numbers, dtype=torch.int64)}
    tensors["data_mask"] = of_targets(first)["loss_mask"]
    tensors["loss_mask"] = spread(first, [each.actor_counted_M for each in columns]) > 0
    names = {
        "advantages": "advantages_M",
        "old_logprobs": "old_logprobs_M",
        "ref_logprobs": "ref_logprobs_M",
        "old_values": "values_M",
        "returns": "returns_M",
        "corrections": "weights_M",
    }
    for name, field in names.items():
        parts = [getattr(each, field) for each in columns]
        if all(part is not None for part in parts):
            tensors[name] = spread(first, parts)
    for name, model in (("logprobs", "actor"), ("new_values", "critic")):
        reads = [each.read for each in watched.get(model, ()) if each.read is not None]
        if reads and len(reads) == len(first):
            tensors[name] = spread(first, reads)
    if any(each.kept_r is not None for each in step.minibatch.sequences):
        del tensors["data_mask"]  # tokens were rejected by rules that a record does not have
    return tensors


def _drawn(step: PolicyStep, watched: Watched) -> dict[str, torch.Tensor]:
    """The tokens that Clip-Cov drew, once more by its seed; of other losses nothing: they follow from the rest."""
    learning, sequences = step.settings.updates.learning, step.minibatch.sequences
    selects = learning.policy_loss.selects
    if selects is None or learning.policy_loss != POLICY_LOSSES.get("clip_cov"):
        return {}
    first = next(iter(watched.values()))
    tokens = float(sum(len(each.advantages_r) for each in sequences if each.counts))
    selected = selects(sequences, learning.policy, tokens, step.minibatch.seed)
    nothing = torch.empty(0, device=first[0].loss.device)
    ones = [torch.cat([nothing, *(selected[number].float() for number in each.numbers)]) for each in step.forwards]
    return {"selected": spread(first, ones) > 0}


def _settings(
    settings: ExperienceSettings, learning: LearningSettings, kl_coef: float, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """The settings that the schema has a name for. What it has none for is left out, and so not judged."""
    advantage, kl = settings.advantage, settings.kl
    found: dict[str, Any] = {
        "reduction": _REDUCTIONS.get(learning.aggregation),
        "longest_tokens": float(settings.scoring.length.max_tokens),
        "temperature": settings.reading.temperature,
        "advantage": next((name for name, known in ESTIMATORS.items() if settings.estimator == known), None),
        "zero_tail": getattr(advantage.options, "otb_zero_tail", None),
        "gamma": advantage.gamma,
        "lam": advantage.lam,
        "norm_by": _norm(settings),
        "std_ddof": 1.0,
        "std_epsilon": 1e-6,
        "whiten": settings.whiten_advantages,
        "kl_estimator": next(
            (name for name in ("k1", "k2", "k3", "abs") if kl.estimator in (KL_ESTIMATORS[name], _pulling(name))), None
        ),
        "kl_in": "none" if "ref_logprobs" not in tensors else "loss" if kl.in_loss else "reward",
        "kl_coef": kl_coef,
        "kl_bound": _K3_BOUND,
        "clip_value": learning.clip_range_value,
        "logprob_rounding": _rounding(tensors),
    }
    pulls = next((True for name in ("k1+", "k3+", "abs+") if kl.estimator == KL_ESTIMATORS[name]), False)
    found["kl_gradient"] = "+" if pulls else None
    found |= {} if settings.correction.bypasses else _of_loss(learning)
    if isinstance(settings.correction, MismatchCorrection):
        found |= _of_mismatch(settings.correction.settings)
    return {name: value for name, value in found.items() if value is not None}


def _of_loss(learning: LearningSettings) -> dict[str, Any]:
    """The policy's loss; of one that a record does not know nothing, so that it is not judged."""
    name = next((name for name, known in POLICY_LOSSES.items() if learning.policy_loss == known), None)
    if name is None:
        return {}
    policy = learning.policy
    return {
        "policy_loss": name,
        "clip_low": policy.clip_low,
        "clip_high": policy.clip_high,
        "dual_clip": policy.dual_clip,
        "entropy_coef": learning.entropy_coef or None,
        **({} if policy.options is None else vars(policy.options)),
    }


def _of_mismatch(mismatch: MismatchSettings) -> dict[str, Any]:
    if mismatch.correction == "none" or mismatch.bypass or mismatch.rejects:
        return {}
    return {
        "mismatch_correction": mismatch.correction,
        "mismatch_level": mismatch.level,
        "mismatch_threshold": mismatch.threshold,
        "mismatch_threshold_lower": mismatch.threshold_lower,
        "mismatch_normalize": mismatch.normalize,
    }


def _norm(settings: ExperienceSettings) -> str | None:
    """Whose standard deviation divides the advantages: by default GRPO's group, and nobody's of RLOO. None: unknown,
    of an estimator from a file."""
    if settings.estimator not in ESTIMATORS.values():
        return None
    usual = "group" if settings.estimator in (ESTIMATORS["grpo"], ESTIMATORS.get("grpo_passk")) else "none"
    if not settings.estimator.norms:
        return "none"
    return (settings.advantage.norm_over or usual) if settings.advantage.norm_by_std else "none"


def _pulling(name: str) -> Any:
    """The estimator of the same value with another gradient, if there is one."""
    return KL_ESTIMATORS.get(f"{name}+")


def _rounding(tensors: Mapping[str, torch.Tensor]) -> float:
    """Nats, of the least likely token."""
    logprobs = tensors.get("ref_logprobs", tensors.get("logprobs", torch.zeros(1)))
    return _ROUNDING * (1.0 + float(logprobs.abs().amax()) if logprobs.numel() else 1.0)


KIND = StepKind(policy_record, _numbers, has_responses=False)
