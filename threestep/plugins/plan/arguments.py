"""The flags of a dry run. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.plan.clock.devices import DEVICES as TIMED_DEVICES
from threestep.plugins.plan.clock.devices import FILE_SUFFIX
from training.utils.base.errors import nearest_names
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

DEVICES = ("cpu", "cuda", *TIMED_DEVICES)


@dataclass
class DryRunArguments:
    """A plan in place of a run, and the device to plan for."""

    topic: ClassVar[str] = "run"

    dry_run: bool = flag(
        False,
        "Check every setting, build the models without weights, print the plan and the memory per rank, and exit. "
        "Nothing is loaded, trained or written.",
    )
    device: str | None = flag(
        None,
        "With --dry_run: device to plan for; default: this machine's. A GPU name (or cpu for this machine) adds "
        f"time estimates. One of {', '.join(DEVICES)}, or a FILE{FILE_SUFFIX} written by `python -m "
        "benchmarks.clock --measure`.",
        "name",
    )
    device_memory_gb: float | None = flag(
        None,
        "With --dry_run: GPU memory in GB (1e9 bytes); default: this machine's GPU, if any.",
        "gigabytes > 0",
    )
    price_per_hour: float | None = flag(
        None, "With --dry_run and a GPU name as --device: price per GPU-hour, in any currency.", "money > 0"
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        for name in ("device", "device_memory_gb", "price_per_hour"):
            given = getattr(self, name)
            mistakes.require(
                given is None or self.dry_run,
                f"--{name} {given} describes a device to plan for and needs --dry_run; a run uses the devices it "
                "sees (set CUDA_VISIBLE_DEVICES= to use the CPU)",
            )
        mistakes.require(
            self.device is None or self.device in DEVICES or self.device.endswith(FILE_SUFFIX),
            f"--device expects one of {', '.join(DEVICES)}, or a FILE{FILE_SUFFIX} that describes a device, got "
            f"'{self.device}'{nearest_names(str(self.device), DEVICES)}",
        )
        mistakes.require(
            self.price_per_hour is None or self.device not in (None, "cuda"),
            f"--price_per_hour {self.price_per_hour} needs a --device of known speed, one of "
            f"{', '.join(('cpu', *TIMED_DEVICES))}, got {self.device or 'none'}; choose one of these",
        )
        mistakes.require(
            self.device_memory_gb is None or self.device != "cpu",
            f"--device_memory_gb {self.device_memory_gb} applies to GPUs, but --device is cpu; leave one of them out",
        )
