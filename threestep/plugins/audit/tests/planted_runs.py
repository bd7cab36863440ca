"""A step's program with one difference planted, for runs that are bisected.

    THREESTEP_PLANT=NAME python -m threestep.plugins.audit.tests.planted_runs MODULE FLAGS

Each of `PLANTS` acts in one step, `AT`, on the rank `RANK` where there are two.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

VARIABLE = "THREESTEP_PLANT"
AT = 3
RANK = 1
_now = 0


def is_now() -> bool:
    return _now == AT


def main() -> None:
    """Plant, and run the module."""
    name = os.environ.get(VARIABLE, "")
    _follow_steps()
    if name:
        PLANTS[name]()
    module, *flags = sys.argv[1:]
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _follow_steps() -> None:
    """Know the step that runs."""
    from training.step1_sft.trainer import SftTrainer
    from training.step2_dpo.trainer import DpoTrainer
    from training.step2_reward.trainer import RewardTrainer
    from training.step3_ppo.trainer import PpoTrainer

    def before(kind: type, method: str, number: Callable[..., int]) -> None:
        original = getattr(kind, method)

        def noting(self: Any, *given: Any, **named: Any) -> Any:
            global _now
            _now = number(*given)
            for act in _BEFORE_STEP:
                act(self)
            return original(self, *given, **named)

        setattr(kind, method, noting)

    for kind in (SftTrainer, DpoTrainer, RewardTrainer):
        before(kind, "_optimizer_step", lambda step: step.number)
    before(PpoTrainer, "next_prompts", lambda iteration, batch: iteration)


_BEFORE_STEP: list[Callable[[Any], None]] = []


def _around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that calls `change(original, *given, **named)` in the step, the original elsewhere."""
    original = getattr(owner, name)

    def changed(*given: Any, **named: Any) -> Any:
        return change(original, *given, **named) if is_now() else original(*given, **named)

    setattr(owner, name, changed)


def _change_rows(change: Callable[[Any], Any]) -> None:
    """Change the rows of the first micro-batch."""
    from training.step1_sft.trainer import SftTrainer

    def changed(original: Any, self: Any, sentences: Any, plan: Any) -> Any:
        first, *others = original(self, sentences, plan)
        is_mine = self.run.ranks.world_size == 1 or self.run.ranks.rank == RANK
        return [replace(first, rows=change(first.rows)), *others] if is_mine else [first, *others]

    _around(SftTrainer, "_micro_batches", changed)


def token() -> None:
    def change(rows: Any) -> Any:
        ids = rows.input_ids_NT.clone()
        ids[0, 1] = (ids[0, 1] + 1) % 300
        return replace(rows, input_ids_NT=ids)

    _change_rows(change)


def _before_step(act: Callable[[Any], None]) -> None:
    _BEFORE_STEP.append(lambda trainer: act(trainer) if is_now() else None)


def _engine(trainer: Any) -> Any:
    return trainer.run.engine if hasattr(trainer, "run") else trainer.roles.actor


def second_moment() -> None:
    def act(trainer: Any) -> None:
        weights = dict(_engine(trainer).module.named_parameters())
        chosen = weights["model.model.layers.0.self_attn.k_proj.weight"]
        _engine(trainer).engine.optimizer.state[chosen]["exp_avg_sq"].mul_(4.0)

    _before_step(act)


def _hooked(name: str, change: Callable[[Any], Any]) -> None:
    """Change what a module returns in the step."""
    seen: list[Any] = []

    def act(trainer: Any) -> None:
        if seen:
            return
        module = dict(_engine(trainer).module.named_modules())[name]

        def hook(_module: Any, _given: Any, output: Any) -> Any:
            if not is_now():
                return None
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        seen.append(module.register_forward_hook(hook))

    _BEFORE_STEP.append(act)


def query() -> None:
    _hooked("model.model.layers.0.self_attn.q_proj", lambda output: output * 1.001)


def dropped_gradient() -> None:
    from training.utils.engine.training_engine import TrainingEngine

    def change(original: Any, self: Any, loss: torch.Tensor) -> Any:
        return original(self, loss * 0.0 if self.ranks.rank == RANK else loss)

    _around(TrainingEngine, "backward", change)


def rollout_score() -> None:
    from training.step3_ppo.contracts.records import Samples

    original = Samples.scored.func  # type: ignore[attr-defined]

    def scored(self: Any) -> Any:
        found = original(self)
        if not is_now():
            return found
        outcomes = found.outcomes_B.clone()
        outcomes[0] += 0.5
        return replace(found, outcomes_B=outcomes)

    Samples.scored.func = scored  # type: ignore[attr-defined]


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (token, second_moment, query, dropped_gradient, rollout_score)
}


if __name__ == "__main__":
    main()
