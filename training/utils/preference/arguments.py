"""The flag of a preference loss's reference. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from typing import Any

from training.utils.opening.flags import OneModelFlags
from training.utils.run.errors import ThreestepError
from training.utils.run.flags import flag

REFERENCES = ("cached", "adapter_off")


def reference_field() -> Any:
    """The dataclass field of `--reference`."""
    return flag(
        "cached",
        "'cached' reads the responses once, with the start model, and stores the result with the data; "
        "'adapter_off', with LoRA, reads them in each step with the adapters off.",
        choices=REFERENCES,
    )


def check_reference(flags: OneModelFlags) -> None:
    """Raise ThreestepError if the reference is to be read from a model whose own weights train."""
    model = flags.model
    if flags.own.reference == "adapter_off" and not (model.lora_dim > 0 and model.only_optimize_lora):
        raise ThreestepError(
            "--reference adapter_off needs --lora_dim above 0 and --only_optimize_lora true: without its adapters a "
            "model is its own reference only if nothing but they train; use --reference cached"
        )
