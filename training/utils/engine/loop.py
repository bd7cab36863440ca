"""Settings of the training loops of steps 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.layout.planner import PlanSettings
from training.utils.models.flops import ComputeMeter
from training.utils.run.traces import Traces


@dataclass(frozen=True)
class LoopSettings:
    """items_per_step: rows of one optimizer step (step 1: sentences, step 2: prompts), over all ranks.
    eval_interval: in optimizer steps; 0 evaluates only before and after training.
    meter: None if MFU is not reported.
    """

    total_steps: int
    items_per_step: int
    train_plan: PlanSettings
    eval_plan: PlanSettings
    eval_interval: int
    pad_token_id: int
    seed: int
    meter: ComputeMeter | None = None
    traces: Traces = Traces()
