"""The losses, one file each. The room serves `--loss_type` by the table of their names. Cheap to import."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.step2_dpo.losses.pairs import PreferenceLoss

# Of the files, each of which has a LOSS; the last two are on marks.
_NAMES = """
sigmoid sigmoid_norm robust ipo hinge apo_zero apo_down plackett_luce orpo simpo cpo sft kto bco
""".split()
LOSSES: dict[str, PreferenceLoss] = {name: pkgutil.resolve_name(f"{__name__}.{name}:LOSS") for name in _NAMES}
# A dataclass of the flags that some losses alone have, in the table's order.
_FLAGS = dict.fromkeys(loss.flags for loss in reversed(LOSSES.values()) if loss.flags)
OwnFlags: Any = type("OwnFlags", tuple(_FLAGS), {})
