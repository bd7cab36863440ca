"""Settings of a model with what these flags change."""

from __future__ import annotations

from typing import Any

from tests.support.lora_settings import lora_settings
from threestep.plugins.speed.preparers import preparers
from training.utils.flags.added import added_flags
from training.utils.models.settings import ModelSettings

FLAGS = ("activation_offload", "mlp_tiles", "use_liger_kernel", "torch_compile")


def fast(name: str = "tiny", **changes: Any) -> ModelSettings:
    """changes: flags of this plugin, in steps 1 and 2, and settings of the model."""
    given = {flag: changes.pop(flag) for flag in FLAGS if flag in changes}
    kind = added_flags("step1_sft")
    added = kind()
    for field in kind.__dataclass_fields__:
        for flag in given.keys() & vars(getattr(added, field)).keys():
            setattr(getattr(added, field), flag, given[flag])
    return lora_settings(name, **changes, preparers=tuple(preparers(added, "")))
