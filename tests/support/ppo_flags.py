"""Step 3's groups of flags from flat flags, as its command line would fill them."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from tests.support.data_flags import data_flags
from training.step3_ppo.flags.ppo_flags import PpoFlags


def ppo_flags(**flags: Any) -> PpoFlags:
    """Every flag goes to the group that has it; those that no other group has are the data's."""
    groups = {}
    for name, group in get_type_hints(PpoFlags).items():
        if name != "data":
            own = {field.name for field in dataclasses.fields(group)} & flags.keys()
            groups[name] = group(**{flag: flags.pop(flag) for flag in own})
    return PpoFlags(**groups, data=data_flags(**flags))
