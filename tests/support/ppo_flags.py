"""Step 3's groups of flags from flat flags, as its command line would fill them."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from tests.support.data_flags import with_flags
from training.step3_ppo.flags.ppo_flags import PpoFlags
from training.utils.data.arguments import RolloutDataArguments
from training.utils.flags.added import added_flags


def ppo_flags(**flags: Any) -> PpoFlags:
    """Every flag goes to the group that has it; those that no other group has are the data's."""
    kinds = get_type_hints(PpoFlags)
    kinds["added"] = added_flags("step3_ppo")
    composed = ("data", "engines", "added")
    groups = {name: _filled(kind, flags) for name, kind in kinds.items() if name not in composed}
    for name in composed[1:]:
        members = {each: _filled(kind, flags) for each, kind in get_type_hints(kinds[name]).items()}
        groups[name] = kinds[name](**members)
    return PpoFlags(**groups, data=with_flags(RolloutDataArguments(), **flags))


def _filled(kind: type, flags: dict[str, Any]) -> Any:
    """Takes its flags out of `flags`."""
    own = {field.name for field in dataclasses.fields(kind)} & flags.keys()
    return kind(**{flag: flags.pop(flag) for flag in own})
