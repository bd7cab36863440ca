"""Records of what verl, OpenRLHF and AReaL hold of a rollout. Serves users' scripts; needs none of their packages:

    record = verl_record(batch, {"advantage": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True, "kl_in": "none"})
    write_record(Path("record/step_000001"), record)

Settings are those of threestep/plugins/audit/README.md, and are the user's to say: these parts of the frameworks do not
hold them. Rewards, advantages and returns are judged by them.

B responses, T = P + R tokens of prompts and responses with padding, A numbers of actions: one for each of the last
tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from threestep.plugins.audit.recording.files import Arrays, RecordHead, StepRecord, check_tensors, checked_settings
from training.utils.base.errors import ThreestepError

_Tensors = dict[str, torch.Tensor]


def verl_record(batch: Any, settings: Mapping[str, Any], step: int = 1) -> StepRecord:
    """The record of a verl DataProto after `compute_advantage`. Groups are those of `uid`, if the batch has it."""
    own, other = batch.batch, batch.non_tensor_batch
    mask_BR = _part(own, "response_mask", "verl's DataProto")
    columns = {
        "rollout_old_logprobs": own.get("old_log_probs"),
        "rollout_sampling_logprobs": own.get("rollout_log_probs"),
        "rollout_ref_logprobs": own.get("ref_log_prob"),
        "rollout_values": own.get("values"),
        "rollout_rewards": own.get("token_level_rewards"),
        "rollout_advantages": own.get("advantages"),
        "rollout_returns": own.get("returns"),
    }
    scores_BR = own.get("token_level_scores")
    more: _Tensors = {} if scores_BR is None else {"rollout_scores": (scores_BR * mask_BR).sum(dim=1)}
    if "uid" in other:
        more["rollout_groups"] = _numbered(other["uid"])
    return _record("verl", mask_BR, columns, more, settings=settings, step=step)


def openrlhf_record(experiences: Sequence[Any], samples: int, settings: Mapping[str, Any], step: int = 1) -> StepRecord:
    """The record of OpenRLHF's experiences after `compute_advantages_and_returns`. samples: responses to a prompt."""
    masks = [_part(vars(one), "action_mask", "OpenRLHF's Experience") for one in experiences]
    width = max(mask.shape[1] for mask in masks)
    columns: dict[str, torch.Tensor | None] = {}
    for name, theirs in (
        ("rollout_old_logprobs", "action_log_probs"),
        ("rollout_sampling_logprobs", "rollout_log_probs"),
        ("rollout_ref_logprobs", "base_action_log_probs"),
        ("rollout_values", "values"),
        ("rollout_advantages", "advantages"),
        ("rollout_returns", "returns"),
    ):
        parts = [part for one in experiences if (part := getattr(one, theirs, None)) is not None]
        columns[name] = _joined(parts, width) if len(parts) == len(experiences) else None
    more: _Tensors = {}
    if all(one.index is not None for one in experiences):
        more["rollout_groups"] = torch.tensor([place for one in experiences for place in one.index]) // samples
    if all(one.rewards is not None for one in experiences):
        more["rollout_scores"] = torch.cat([one.rewards.float().cpu() for one in experiences])
    return _record("openrlhf", _joined(masks, width).bool(), columns, more, settings=settings, step=step)


def areal_record(data: Mapping[str, Any], samples: int, settings: Mapping[str, Any], step: int = 1) -> StepRecord:
    """The record of AReaL's trajectories after `compute_advantages`. samples: responses to a prompt, one after the
    other.

    AReaL keeps a token's numbers at the place that predicts it. The last place predicts nothing.
    """
    mask_BT = _part(data, "loss_mask", "AReaL's trajectories")
    columns = {
        "rollout_old_logprobs": data.get("prox_logp", data.get("logprobs")),
        "rollout_ref_logprobs": data.get("ref_logp"),
        "rollout_values": data.get("values"),
        "rollout_rewards": data.get("tot_rewards"),
        "rollout_advantages": data.get("advantages"),
        "rollout_returns": data.get("returns"),
    }
    more: _Tensors = {"rollout_groups": torch.arange(len(mask_BT)) // samples}
    if "rewards" in data:
        more["rollout_scores"] = data["rewards"].float()
    return _record("areal", mask_BT.bool(), columns, more, settings=settings, step=step)


def _part(parts: Mapping[str, Any], name: str, where: str) -> torch.Tensor:
    value = parts.get(name)
    if not isinstance(value, torch.Tensor):
        raise ThreestepError(f"{where} has no tensor {name}; create the record after the advantages are computed")
    return value.cpu()


def _numbered(names: Iterable[Any]) -> torch.Tensor:
    """Return [B], equal numbers for equal names."""
    known: dict[Any, int] = {}
    return torch.tensor([known.setdefault(name, len(known)) for name in names])


def _joined(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return all rows, each padded at its end to `width`."""
    return torch.cat([torch.nn.functional.pad(part.cpu(), (0, width - part.shape[1])) for part in parts])


def _record(
    name: str,
    mask_BR: torch.Tensor,
    columns: Mapping[str, torch.Tensor | None],
    more: _Tensors,
    *,
    settings: Mapping[str, Any],
    step: int,
) -> StepRecord:
    """Rectangles under a mask, as a record: the numbers of drawn tokens, one response after the other."""
    drawn_BR = mask_BR.bool()
    found: _Tensors = {"rollout_numbers": torch.arange(len(drawn_BR)), "rollout_lengths": drawn_BR.sum(dim=1), **more}
    of_critic = () if settings.get("advantage") == "gae" else ("rollout_values", "rollout_returns")
    for column, values in columns.items():
        if values is not None and column not in of_critic:  # without a critic their returns are the advantages
            found[column] = values.detach().cpu().float()[drawn_BR]
    arrays: Arrays = {part: values.numpy() for part, values in found.items()}
    check_tensors(arrays, name)
    head = RecordHead(
        "policy", step, settings=checked_settings(settings, f"settings of {name}_record"), trainer={"name": name}
    )
    return StepRecord(head, [arrays])
