"""Losses on pairs and on marks. The room serves `--loss_type` by the table of their names. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.step2_dpo.losses.marked import MARKED
from training.step2_dpo.losses.ranked import RANKED

if TYPE_CHECKING:
    from training.step2_dpo.losses.pairs import PreferenceLoss

LOSSES: dict[str, PreferenceLoss] = {**RANKED, **MARKED}
# A dataclass of the flags that some losses alone have, in the table's order.
_FLAGS = dict.fromkeys(loss.flags for loss in reversed(LOSSES.values()) if loss.flags)
OwnFlags: Any = type("OwnFlags", tuple(_FLAGS), {})
