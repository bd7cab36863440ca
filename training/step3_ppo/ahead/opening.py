"""The choice between two queues of rollouts ahead: in strict order (`pipeline`), or as groups end (`free`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from training.step3_ppo.ahead.admission import Admission
from training.step3_ppo.ahead.free import FreeRollouts
from training.step3_ppo.ahead.pipeline import RolloutsAhead
from training.step3_ppo.ahead.schedule import read_schedule

if TYPE_CHECKING:
    from training.step3_ppo.ahead.records import Asked
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.engine.whole_model import WholeModel


def open_ahead(
    settings: PpoSettings,
    engine: RolloutEngine,
    lender: WholeModel,
    ask: Callable[[int], Asked],
    *,
    ask_alone: Callable[[int], Asked],
) -> RolloutsAhead | FreeRollouts | None:
    """Return what draws the rollouts of later steps while one trains; None where the newest weights draw them.

    lender: the trained model. ask: what to ask for in a step; ask_alone: at a position of the run.
    """
    drawing, ranks = settings.drawing, lender.engine.ranks
    if not drawing.rollouts_ahead:
        return None
    in_background = engine.takes_weights or ranks.device.type == "cpu"
    if not drawing.takes_as_they_end:
        last, ahead = settings.total_rollouts, drawing.rollouts_ahead
        return RolloutsAhead(ahead, engine, lender, ask, last_step=last, in_background=in_background)
    batches = drawing.generation_batches
    admission = Admission(drawing.rollouts_ahead, drawing.prompts_per_batch * batches, settings.total_rollouts)
    schedule = None
    if drawing.replay_schedule is not None:
        every = Admission(admission.oldest, admission.groups * ranks.world_size, admission.steps)
        schedule = read_schedule(drawing.replay_schedule, every)
    return FreeRollouts(
        admission, batches, engine, lender, ask=ask_alone, schedule=schedule, in_background=in_background
    )
