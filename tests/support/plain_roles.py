"""Step 3's models without DeepSpeed: tiny real models under plain SGD, for tests of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from training.step3_ppo.roles.roles import Reference, Roles
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.training_engine import StepReport
from training.utils.engine.zero3 import full_tensors
from training.utils.models.token_model import PolicyModel, ScalarModel

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


class PlainEngine:
    """What step 3 asks of a TrainingEngine. events: gets "step" at each step; gradients are kept till then."""

    def __init__(self, module: torch.nn.Module, ranks: Ranks, events: list[str], learning_rate: float) -> None:
        self.module, self.ranks, self.settings = module, ranks, SimpleNamespace(zero_stage=0)
        self.steps = 0
        self._events, self._learning_rate = events, learning_rate

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    @property
    def updates(self) -> int:
        return self.steps

    def full_tensors(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return full_tensors(model, zero_stage=0)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> StepReport:
        self.steps += 1
        self._events.append("step")
        trained = [part for part in self.module.parameters() if part.grad is not None]
        skipped = not all(part.grad.isfinite().all() for part in trained)
        with torch.no_grad():
            for part in trained:
                if not skipped:
                    part -= self._learning_rate * part.grad
                part.grad = None
        return StepReport(self._learning_rate, math.nan, skipped)


class FunctionScorer:
    """A reward model that is a function of rows, with scores in float32."""

    def __init__(self, read: Callable[[Any], torch.Tensor]) -> None:
        self._read, self.model = read, SimpleNamespace(dtype=torch.float32)

    def __call__(self, rows: Any) -> torch.Tensor:
        return self._read(rows)


def plain_roles(
    reward_model: Any, with_critic: bool = True, with_reference: bool = True, ranks: Ranks = ALONE, rate: float = 0.0
) -> tuple[Roles, list[str]]:
    """Return the roles, and the events of the actor: "step" for each. rate: of plain SGD."""
    events: list[str] = []
    actor_model, critic_model = tiny_causal_lm("llama", seed=1), tiny_scalar_model("llama", seed=3)
    actor: Any = PlainEngine(PolicyModel(actor_model), ranks, events, rate)
    critic: Any = PlainEngine(ScalarModel(critic_model), ranks, [], rate)
    frozen: Any = PolicyModel(tiny_causal_lm("llama", seed=2)).requires_grad_(False)
    roles = Roles(
        actor=actor,
        critic=critic if with_critic else None,
        reference=Reference(frozen, actor) if with_reference else None,
        reward_model=reward_model
        if reward_model is None or hasattr(reward_model, "model")
        else FunctionScorer(reward_model),
    )
    return roles, events
