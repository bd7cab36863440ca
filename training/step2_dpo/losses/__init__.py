"""The losses on pairs, one file each. The room serves `--loss_type` by the table of their names. Cheap to import."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.step2_dpo.losses.pairs import PreferenceLoss

_NAMES = ("sigmoid", "ipo", "hinge")  # of the files, each of which has a LOSS
LOSSES: dict[str, PreferenceLoss] = {name: pkgutil.resolve_name(f"{__name__}.{name}:LOSS") for name in _NAMES}
# A dataclass of the flags that losses have for themselves, in the table's order.
OwnFlags: Any = type("OwnFlags", tuple(loss.flags for loss in reversed(LOSSES.values()) if loss.flags), {})
