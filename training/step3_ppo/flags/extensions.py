"""Advantage estimators and policy losses by name or from a user's file. What a user's function returns is checked."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.losses import POLICY_LOSSES
from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens
from training.utils.base.errors import ThreestepError
from training.utils.base.tables import check_signature, entry_named
from training.utils.base.user_files import call_user, is_address
from training.utils.plugins.objectives import Estimator, PolicyLoss
from training.utils.plugins.registry import owner_sentence

_Record = TypeVar("_Record", AdvantageInputs, PolicyTokens)


def estimator_named(given: str) -> Estimator:
    """Return the estimator of `--advantage`: a name, or FILE.py:NAME of an Estimator or its function."""
    estimator = entry_named("--advantage", given, ESTIMATORS, Estimator, owner=owner_sentence("advantages", given))
    if not is_address(given):
        return estimator
    check_signature(estimator.estimate, "--advantage", given, ("inputs", "settings"))

    def estimate(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = call_user(estimator.estimate, _copied(inputs), settings)
        names, shape = ("advantages_BR", "returns_BR"), inputs.rewards_BR.shape
        _check_pair("--advantage", given, names, result, shape=shape, is_complete=estimator.needs_critic)
        return result

    return replace(estimator, estimate=estimate)


def policy_loss_named(given: str) -> PolicyLoss:
    """Return the loss of `--policy_loss`: a name, or FILE.py:NAME of a PolicyLoss or its function."""
    owner = owner_sentence("policy_losses", given)
    policy_loss = entry_named("--policy_loss", given, POLICY_LOSSES, PolicyLoss, owner=owner)
    if not is_address(given):
        return policy_loss
    check_signature(policy_loss.loss, "--policy_loss", given, ("tokens", "settings"))

    def loss(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
        result = call_user(policy_loss.loss, _copied(tokens), settings)
        _check_pair("--policy_loss", given, ("loss_M", "clipped_M"), result, shape=tokens.logprobs_M.shape)
        if tokens.logprobs_M.requires_grad and not result[0].requires_grad:
            raise ThreestepError(
                f"--policy_loss expects loss_M of '{given}' to have a gradient, got none; compute it from logprobs_M"
            )
        return result

    return replace(policy_loss, loss=loss)


def _copied(record: _Record) -> _Record:
    """Return the record with tensors of its own, which a user's function may change in place: the loop reads its own
    again. Gradients flow through the copies."""
    parts = {field.name: getattr(record, field.name) for field in fields(record)}
    copies: dict[str, Any] = {name: part.clone() for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return replace(record, **copies)


def _check_pair(
    flag: str, given: str, names: tuple[str, str], result: Any, *, shape: torch.Size, is_complete: bool = True
) -> None:
    """is_complete: the second may not be None."""
    if not isinstance(result, tuple) or len(result) != 2:
        wanted = f"the pair ({', '.join(names)})"
        raise ThreestepError(f"{flag} expects '{given}' to return {wanted}, got {type(result).__name__}")
    for name, tensor in zip(names, result if is_complete or result[1] is not None else result[:1], strict=False):
        got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if got != list(shape):
            raise ThreestepError(f"{flag} expects {name} of '{given}' to be a tensor of shape {list(shape)}, got {got}")
